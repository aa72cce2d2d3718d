"""Text of the Triton kernels of linear attention by chunks; `linear_kernels.py` launches them.

A program has a chunk of C tokens of one head, or a tile of a head's state and all its chunks in turn. Sums and states
are float32; what is multiplied is of the inputs' dtype, on a Hopper GPU by `wgmma`.

Decays. Of pairs of tokens with a decay a head, the log decay from j to i is the running sum over i of those of tokens
behind j, for each j on its own: neighbours are added, nothing is subtracted. With a decay a row the C x C pairs are cut
as a tree cuts them: at level s, tokens i of each odd block of s tokens meet tokens j of the block before it, and the
decay between them is a factor of i, its sum from the first token of its block on, and one of j, its sum to the last of
its own; both are at most 1. So each level is one product of C x K by K x C matrices of which that level's pairs are
kept, log2(C) in all and no pair by hand: more operations than pairs need, but those of a matrix unit. From one level to
the next the sums grow by the partner block's total, one gather.

The gradient of a log decay at t is of pairs i >= t > j: a sum over i from t on of what i reads, less that over j from t
on of what was read of j. What both are products of is rounded once, so that pairs behind t cancel to float32.
"""

TEXT = """
@triton.jit
def tile(
    ptr, batch, row, seen, head, first, LENGTH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):
    # [C, WIDE] of an array [B, T, HEADS, SIZE]; 0 where it is not seen.
    line = (batch.to(tl.int64) * LENGTH + row) * HEADS + head
    return tl.load(ptr + line[:, None] * SIZE + (first + tl.arange(0, WIDE))[None, :], mask=seen[:, None], other=0.0)


@triton.jit
def place_of(
    batch, row, head, first, LENGTH: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr
):
    line = (batch.to(tl.int64) * LENGTH + row) * HEADS + head
    return line[:, None] * SIZE + (first + tl.arange(0, WIDE))[None, :]


@triton.jit
def decays(
    g_ptr, batch, row, begin, head, first, SHIFT: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, DEEP: tl.constexpr, KIND: tl.constexpr,
):
    # Log decays of the chunk moved by SHIFT tokens, [C, DEEP], or [C] of a head; 0 beyond the chunk.
    at = row + SHIFT
    seen = (at >= begin) & (at < begin + CHUNK) & (at < LENGTH)
    if KIND == 2:
        return tile(g_ptr, batch, at, seen, head, first, LENGTH, HEADS, DEPTH, DEEP).to(tl.float32)
    else:
        return tl.load(g_ptr + (batch.to(tl.int64) * LENGTH + at) * HEADS + head, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def kept_before(
    g_ptr, batch, row, begin, head, first, EXCLUSIVE: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, DEEP: tl.constexpr, KIND: tl.constexpr,
):
    # What each token reads of the state before the chunk.
    g = decays(g_ptr, batch, row, begin, head, first, -1 if EXCLUSIVE else 0, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
    kept = tl.exp(tl.cumsum(g, 0))
    return kept if KIND == 2 else kept[:, None]


@triton.jit
def kept_after(
    g_ptr, batch, row, begin, head, first, LENGTH: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    CHUNK: tl.constexpr, DEEP: tl.constexpr, KIND: tl.constexpr,
):
    # What of each token's product is left at the chunk's end.
    g = decays(g_ptr, batch, row, begin, head, first, 1, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
    kept = tl.exp(tl.cumsum(g, 0, reverse=True))
    return kept if KIND == 2 else kept[:, None]


@triton.jit
def documents(doc_ptr, batch, row, begin, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    # Of each token, of the state before the chunk, and of that behind it; doc_ptr has what was before the first token.
    at = doc_ptr + batch * (LENGTH + 1)
    mine = tl.load(at + tl.minimum(row, LENGTH - 1) + 1)
    return mine, tl.load(at + begin), tl.load(at + tl.minimum(begin + CHUNK, LENGTH))


@triton.jit
def level_of(level, CHUNK: tl.constexpr, DEEP: tl.constexpr):
    # Of blocks of 2^level tokens: pairs that meet, tokens of odd blocks, the last token of each one's partner block.
    i = tl.arange(0, CHUNK)
    block = i >> level
    odd = (block & 1) == 1
    meet = odd[:, None] & (block[:, None] == block[None, :] + 1)
    partner = ((block ^ 1) << level) + (1 << level) - 1
    return meet, odd[:, None], tl.broadcast_to(partner[:, None], [CHUNK, DEEP])


@triton.jit
def scores_of(
    q_ptr, k_ptr, g_ptr, bonus_ptr, batch, row, begin, head, LENGTH: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, DEEP: tl.constexpr,
    KIND: tl.constexpr, EXCLUSIVE: tl.constexpr, EXACT: tl.constexpr,
):
    # q_i k_j with the decay between, and that decay of a head; pairs of j > i are to be masked.
    i = tl.arange(0, CHUNK)
    seen = row < LENGTH
    group = head // (HEADS // GROUPS)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    kept = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.range(0, DEPTH, DEEP):
        q = tile(q_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP)
        k = tile(k_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP)
        if KIND < 2:
            scores = tl.dot(q, tl.trans(k), scores, input_precision=EXACT)
        else:
            own = q.to(tl.float32) * k.to(tl.float32)
            g = decays(g_ptr, batch, row, begin, head, first, 0, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
            before = g
            if EXCLUSIVE:
                own *= tl.load(bonus_ptr + head * DEPTH + first + tl.arange(0, DEEP))[None, :]
                before = tl.zeros_like(g)
            after = tl.zeros_like(g)
            scores += tl.where(i[:, None] == i[None, :], tl.sum(own, 1)[:, None], 0.0)
            for level in tl.range(0, LEVELS):
                meet, odd, partner = level_of(level, CHUNK, DEEP)
                reads, writes = (q * tl.exp(before)).to(q.dtype), (k * tl.exp(after)).to(k.dtype)
                scores += tl.where(meet, tl.dot(reads, tl.trans(writes), input_precision=EXACT), 0.0)
                total = tl.gather(before + g if EXCLUSIVE else before, partner, 0)
                before += tl.where(odd, total, 0.0)
                after += tl.where(odd, 0.0, total)
    if KIND == 1:
        g = decays(g_ptr, batch, row, begin, head, 0, 0, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
        kept = tl.exp(tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), 0))
        scores *= kept
    return scores, kept


@triton.jit
def carry(
    x_ptr, y_ptr, ones_ptr, g_ptr, doc_ptr, first_ptr, first_line_ptr, states_ptr, lines_ptr, last_ptr, last_line_ptr,
    LENGTH: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, DOCUMENTS: tl.constexpr, EXCLUSIVE: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr,
    EXACT: tl.constexpr,
):
    # S <- decay S + x^T y over chunks: of keys and values, or in REVERSE of queries and the outputs' gradients.
    deep = tl.program_id(0) % (DEPTH // DEEP) * DEEP
    wide = tl.program_id(0) // (DEPTH // DEEP) % (WIDTH // WIDE) * WIDE
    place = tl.program_id(0) // (DEPTH // DEEP * (WIDTH // WIDE))
    batch, head = place // HEADS, place % HEADS
    inside = (deep + tl.arange(0, DEEP))[:, None] * WIDTH + (wide + tl.arange(0, WIDE))[None, :]
    state = tl.load(first_ptr + place.to(tl.int64) * DEPTH * WIDTH + inside)
    along = deep + tl.arange(0, DEEP)
    line = tl.zeros([DEEP], tl.float32)
    if NORM:
        line = tl.load(first_line_ptr + place * DEPTH + along)
    for step in tl.range(0, CHUNKS):
        n = CHUNKS - 1 - step if REVERSE else step
        here = place.to(tl.int64) * CHUNKS + n
        tl.store(states_ptr + here * DEPTH * WIDTH + inside, state.to(states_ptr.dtype.element_ty))
        if NORM:
            tl.store(lines_ptr + here * DEPTH + along, line, mask=wide + along * 0 == 0)
        begin = n * CHUNK
        row = begin + tl.arange(0, CHUNK)
        seen = row < LENGTH
        x = tile(x_ptr, batch, row, seen, head // (HEADS // GROUPS), deep, LENGTH, GROUPS, DEPTH, DEEP)
        y = tile(y_ptr, batch, row, seen, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        kept = tl.full([DEEP], 1.0, tl.float32)
        if KIND > 0:
            if REVERSE:
                x *= kept_before(
                    g_ptr, batch, row, begin, head, deep, EXCLUSIVE, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND
                )
            else:
                x *= kept_after(g_ptr, batch, row, begin, head, deep, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
            g = decays(g_ptr, batch, row, begin, head, deep, 0, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
            kept *= tl.exp(tl.sum(g, 0))
        if DOCUMENTS:
            mine, enters, leaves = documents(doc_ptr, batch, row, begin, LENGTH, CHUNK)
            x = tl.where((mine == (enters if REVERSE else leaves))[:, None], x, 0.0)
            kept = tl.where(enters == leaves, kept, 0.0)
        if NORM:
            weight = tl.where(seen, 1.0, 0.0)
            if REVERSE:
                weight = tl.load(ones_ptr + (batch * LENGTH + row) * HEADS + head, mask=seen, other=0.0)
            line = line * kept + tl.sum(x.to(tl.float32) * weight[:, None], 0)
        state = state * kept[:, None]
        state = tl.dot(tl.trans(x.to(y.dtype)), y, state, input_precision=EXACT)
    tl.store(last_ptr + place.to(tl.int64) * DEPTH * WIDTH + inside, state)
    if NORM:
        tl.store(last_line_ptr + place * DEPTH + along, line, mask=wide + along * 0 == 0)


@triton.jit
def outputs(
    q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, doc_ptr, states_ptr, lines_ptr, floor_ptr, o_ptr, norm_ptr,
    LENGTH: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, DOCUMENTS: tl.constexpr, EXCLUSIVE: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    FLOOR: tl.constexpr,
):
    n, place = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    batch, head = place // HEADS, place % HEADS
    here = place.to(tl.int64) * CHUNKS + n
    begin = n * CHUNK
    i = tl.arange(0, CHUNK)
    row = begin + i
    seen = row < LENGTH
    group = head // (HEADS // GROUPS)
    scores, _ = scores_of(
        q_ptr, k_ptr, g_ptr, bonus_ptr, batch, row, begin, head, LENGTH, GROUPS, HEADS, DEPTH, CHUNK, LEVELS, DEEP,
        KIND, EXCLUSIVE, EXACT,
    )
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    factor = tl.full([CHUNK, 1], 1.0, tl.float32)  # of what is read of the state
    if KIND == 1:
        factor = kept_before(g_ptr, batch, row, begin, head, 0, False, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
    if DOCUMENTS:
        mine, enters, _ = documents(doc_ptr, batch, row, begin, LENGTH, CHUNK)
        scores = tl.where(mine[:, None] == mine[None, :], scores, 0.0)
        factor = tl.where((mine == enters)[:, None], factor, 0.0)
    if NORM:
        norm = tl.zeros([CHUNK], tl.float32)
        for first in tl.range(0, DEPTH, DEEP):
            q = tile(q_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP).to(tl.float32)
            if KIND == 2:
                q *= kept_before(
                    g_ptr, batch, row, begin, head, first, EXCLUSIVE, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND
                )
            norm += tl.sum(q * tl.load(lines_ptr + here * DEPTH + first + tl.arange(0, DEEP))[None, :], 1)
        norm = tl.sum(scores + tl.where(i[None, :] == 0, norm[:, None] * factor, 0.0), 1)
        tl.store(norm_ptr + (batch * LENGTH + row) * HEADS + head, norm, mask=seen)
        if FLOOR:
            floor = tl.load(floor_ptr + (batch * LENGTH + row) * HEADS + head, mask=seen, other=1.0)
            norm = tl.maximum(tl.abs(norm), floor)
    scores = scores.to(v_ptr.dtype.element_ty)
    for wide in tl.range(0, WIDTH, WIDE):
        out = tl.zeros([CHUNK, WIDE], tl.float32)
        for first in tl.range(0, DEPTH, DEEP):
            q = tile(q_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP)
            if KIND == 2:
                kept = kept_before(
                    g_ptr, batch, row, begin, head, first, EXCLUSIVE, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND
                )
                q = (q * kept).to(scores.dtype)
            inside = (first + tl.arange(0, DEEP))[:, None] * WIDTH + (wide + tl.arange(0, WIDE))[None, :]
            out = tl.dot(q, tl.load(states_ptr + here * DEPTH * WIDTH + inside), out, input_precision=EXACT)
        if KIND == 1 or DOCUMENTS:
            out *= factor
        v = tile(v_ptr, batch, row, seen, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        out = tl.dot(scores, v, out, input_precision=EXACT)
        if FLOOR:
            out /= norm[:, None]
        at = o_ptr + place_of(batch, row, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        tl.store(at, out.to(o_ptr.dtype.element_ty), mask=seen[:, None])


@triton.jit
def value_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, doc_ptr, do_ptr, dnorm_ptr, dstates_ptr, dv_ptr, ds_ptr, dg_ptr,
    LENGTH: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, DOCUMENTS: tl.constexpr, EXCLUSIVE: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
):
    # Gradients of values, of the products of queries and keys, and what of a head's log decays acts between tokens.
    n, place = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    batch, head = place // HEADS, place % HEADS
    here = place.to(tl.int64) * CHUNKS + n
    begin = n * CHUNK
    i = tl.arange(0, CHUNK)
    row = begin + i
    seen = row < LENGTH
    group = head // (HEADS // GROUPS)
    scores, kept = scores_of(
        q_ptr, k_ptr, g_ptr, bonus_ptr, batch, row, begin, head, LENGTH, GROUPS, HEADS, DEPTH, CHUNK, LEVELS, DEEP,
        KIND, EXCLUSIVE, EXACT,
    )
    pairs = i[:, None] >= i[None, :]
    factor = tl.full([CHUNK, 1], 1.0, tl.float32)  # of what is written to the state
    if KIND == 1:
        factor = kept_after(g_ptr, batch, row, begin, head, 0, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
    if DOCUMENTS:
        mine, _, leaves = documents(doc_ptr, batch, row, begin, LENGTH, CHUNK)
        pairs = pairs & (mine[:, None] == mine[None, :])
        factor = tl.where((mine == leaves)[:, None], factor, 0.0)
    scores = tl.where(pairs, scores, 0.0)
    turned = tl.trans(scores).to(v_ptr.dtype.element_ty)
    ds = tl.zeros([CHUNK, CHUNK], tl.float32)
    for wide in tl.range(0, WIDTH, WIDE):
        do = tile(do_ptr, batch, row, seen, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        v = tile(v_ptr, batch, row, seen, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        ds = tl.dot(do, tl.trans(v), ds, input_precision=EXACT)
        dv = tl.zeros([CHUNK, WIDE], tl.float32)
        for first in tl.range(0, DEPTH, DEEP):
            k = tile(k_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP)
            if KIND == 2:
                left = kept_after(g_ptr, batch, row, begin, head, first, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
                k = (k * left).to(turned.dtype)
            inside = (first + tl.arange(0, DEEP))[:, None] * WIDTH + (wide + tl.arange(0, WIDE))[None, :]
            dv = tl.dot(k, tl.load(dstates_ptr + here * DEPTH * WIDTH + inside), dv, input_precision=EXACT)
        if KIND == 1 or DOCUMENTS:
            dv *= factor
        dv = tl.dot(turned, do, dv, input_precision=EXACT)
        at = dv_ptr + place_of(batch, row, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=seen[:, None])
    if NORM:
        ds += tl.load(dnorm_ptr + (batch * LENGTH + row) * HEADS + head, mask=seen, other=0.0)[:, None]
    ds = tl.where(pairs, ds, 0.0)
    if KIND == 1:
        beyond = tl.cumsum(scores * ds, 0, reverse=True)  # of pairs (i, j), those of all i from t on, at [t, j]
        dg = tl.sum(tl.where(i[:, None] > i[None, :], beyond, 0.0), 1)
        tl.store(dg_ptr + (batch * LENGTH + row) * HEADS + head, dg, mask=seen)
        ds *= kept
    tl.store(ds_ptr + here * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :], ds.to(ds_ptr.dtype.element_ty))


@triton.jit
def key_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, bonus_ptr, doc_ptr, do_ptr, dnorm_ptr, states_ptr, lines_ptr, dstates_ptr, dlines_ptr,
    ds_ptr, dq_ptr, dk_ptr, dg_ptr, dbonus_ptr,
    LENGTH: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
    KIND: tl.constexpr, DOCUMENTS: tl.constexpr, EXCLUSIVE: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
):
    # Gradients of a few columns of queries, of keys and of log decays; of a head's decays a part, to be added up.
    TILES: tl.constexpr = DEPTH // DEEP
    part, n = tl.program_id(0) % TILES, tl.program_id(0) // TILES % CHUNKS
    place = tl.program_id(0) // (TILES * CHUNKS)
    batch, head = place // HEADS, place % HEADS
    here = place.to(tl.int64) * CHUNKS + n
    first, begin = part * DEEP, n * CHUNK
    i = tl.arange(0, CHUNK)
    along = first + tl.arange(0, DEEP)
    row = begin + i
    seen = row < LENGTH
    group = head // (HEADS // GROUPS)
    q = tile(q_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP)
    k = tile(k_ptr, batch, row, seen, group, first, LENGTH, GROUPS, DEPTH, DEEP)
    ds = tl.load(ds_ptr + here * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
    g = decays(g_ptr, batch, row, begin, head, first, 0, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND) if KIND > 0 else 0.0
    if KIND < 2:
        dq = tl.dot(ds, k, input_precision=EXACT)
        dk = tl.dot(tl.trans(ds), q, input_precision=EXACT)
        if KIND == 1:
            before = tl.cumsum(g, 0)[:, None]
            ahead = decays(g_ptr, batch, row, begin, head, first, 1, LENGTH, HEADS, DEPTH, CHUNK, DEEP, KIND)
            after = tl.cumsum(ahead, 0, reverse=True)[:, None]
    else:
        before, after = g, tl.zeros_like(g)
        weight = tl.sum(tl.where(i[:, None] == i[None, :], ds.to(tl.float32), 0.0), 1)[:, None]
        between = tl.zeros([CHUNK, DEEP], tl.float32)
        if EXCLUSIVE:
            tl.store(dbonus_ptr + here * DEPTH + along, tl.sum(weight * q * k, 0))
            weight = weight * tl.load(bonus_ptr + head * DEPTH + along)[None, :]
            before = tl.zeros_like(g)
            read = tl.zeros([CHUNK, DEEP], tl.float32)
        dq, dk = weight * k, weight * q
        for level in tl.range(0, LEVELS):
            meet, odd, partner = level_of(level, CHUNK, DEEP)
            met = tl.where(meet, ds, 0.0).to(ds.dtype)
            kept, left = tl.exp(before), tl.exp(after)
            query, key = (q * kept).to(q.dtype), (k * left).to(k.dtype)
            to_query = tl.dot(met, key, input_precision=EXACT)
            dq += kept * to_query
            between += query * to_query
            if EXCLUSIVE:
                read += query * to_query
            to_key = tl.dot(tl.trans(met), query, input_precision=EXACT)
            dk += left * to_key
            between -= key * to_key
            total = tl.gather(before + g if EXCLUSIVE else before, partner, 0)
            before += tl.where(odd, total, 0.0)
            after += tl.where(odd, 0.0, total)
    # Through the state: before the chunk, and behind it.
    by_read = tl.zeros([CHUNK, DEEP], tl.float32)
    by_write = tl.zeros([CHUNK, DEEP], tl.float32)
    dtotal = tl.zeros([DEEP], tl.float32)
    for wide in tl.range(0, WIDTH, WIDE):
        inside = along[:, None] * WIDTH + (wide + tl.arange(0, WIDE))[None, :]
        state = tl.load(states_ptr + here * DEPTH * WIDTH + inside)
        dstate = tl.load(dstates_ptr + here * DEPTH * WIDTH + inside)
        do = tile(do_ptr, batch, row, seen, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        v = tile(v_ptr, batch, row, seen, head, wide, LENGTH, HEADS, WIDTH, WIDE)
        by_read = tl.dot(do, tl.trans(state), by_read, input_precision=EXACT)
        by_write = tl.dot(v, tl.trans(dstate), by_write, input_precision=EXACT)
        if KIND > 0:
            dtotal += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    if NORM:
        line, dline = tl.load(lines_ptr + here * DEPTH + along), tl.load(dlines_ptr + here * DEPTH + along)
        dnorm = tl.load(dnorm_ptr + (batch * LENGTH + row) * HEADS + head, mask=seen, other=0.0)
        by_read += dnorm[:, None] * line[None, :]
        by_write += dline[None, :]
        dtotal += line * dline
    if KIND > 0:
        by_read *= tl.exp(before)
        by_write *= tl.exp(after)
        dtotal *= tl.exp(tl.sum(g, 0))
    if DOCUMENTS:
        mine, enters, leaves = documents(doc_ptr, batch, row, begin, LENGTH, CHUNK)
        by_read = tl.where((mine == enters)[:, None], by_read, 0.0)
        by_write = tl.where((mine == leaves)[:, None], by_write, 0.0)
        dtotal = tl.where(enters == leaves, dtotal, 0.0)
    dq += by_read
    dk += by_write
    if KIND > 0:
        # A token's log decay acts on what is read from it on, on what was written before it, and on what stays.
        by_read, by_write = q * by_read, k * by_write
        if KIND == 1:
            by_read, by_write, dtotal = tl.sum(by_read, 1), tl.sum(by_write, 1), tl.sum(dtotal, 0)
            dg = tl.cumsum(by_write, 0) - by_write + tl.cumsum(by_read, 0, reverse=True) + dtotal
            tl.store(dg_ptr + ((batch.to(tl.int64) * LENGTH + row) * HEADS + head) * TILES + part, dg, mask=seen)
        else:
            dg = tl.cumsum(by_write, 0) - by_write + tl.cumsum(between + by_read, 0, reverse=True) + dtotal[None, :]
            if EXCLUSIVE:
                dg -= read + by_read  # a token's own decay comes after it is read
            at = place_of(batch, row, head, first, LENGTH, HEADS, DEPTH, DEEP)
            tl.store(dg_ptr + at, dg, mask=seen[:, None])
    at = place_of(batch, row, head, first, LENGTH, HEADS, DEPTH, DEEP)
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=seen[:, None])
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=seen[:, None])
"""
