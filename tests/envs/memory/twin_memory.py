"""The card games as lists of cards: each twin is told what was dealt and works out the rest."""


class RepeatTwin:
    """RepeatFirst (k = None) and RepeatPrevious."""

    def __init__(self, num_cards, num_kinds, k=None):
        self.num_cards, self.num_kinds, self.k = num_cards, num_kinds, k

    def begin(self, card):
        self.hand = [card]

    def seen(self):
        return self.hand[-1]

    def answer(self):
        return (
            self.hand[0]
            if self.k is None
            else self.hand[-self.k]
            if len(self.hand) >= self.k
            else None
        )

    def step(self, action, card):
        answer = self.answer()
        scale = 1 / (self.num_cards - (self.k or 1))
        reward = 0.0 if answer is None else scale if action == answer else -scale
        self.hand.append(card)
        return reward, len(self.hand) == self.num_cards

    def deck_is_fair(self):
        return all(
            self.hand.count(kind) == self.num_cards // self.num_kinds
            for kind in range(self.num_kinds)
        )


class CountTwin:
    def __init__(self, num_cards, num_kinds):
        self.num_cards, self.num_kinds = num_cards, num_kinds

    def begin(self, pair):
        self.cards, self.queries = [pair[0]], [pair[1]]

    def seen(self):
        return [self.cards[-1], self.queries[-1]]

    def answer(self):
        return self.cards.count(self.queries[-1])

    def step(self, action, pair):
        reward = (1 if action == self.answer() else -1) / (self.num_cards - 1)
        self.cards.append(pair[0])
        self.queries.append(pair[1])
        return reward, len(self.cards) == self.num_cards

    def deck_is_fair(self):
        each = self.num_cards // self.num_kinds
        return all(
            pile.count(kind) == each
            for pile in (self.cards, self.queries)
            for kind in range(self.num_kinds)
        )


class AutoencodeTwin:
    def __init__(self, num_cards, num_kinds):
        self.num_cards, self.num_kinds = num_cards, num_kinds

    def begin(self, pair):
        self.pile, self.all = [pair[1]], [pair[1]]
        self.playing, self.shown = False, pair[1]

    def seen(self):
        return [int(self.playing), self.shown]

    def answer(self):
        return self.pile[-1] if self.playing else None

    def step(self, action, pair):
        if self.playing:
            reward = (1 if action == self.pile.pop() else -1) / self.num_cards
            self.shown = 0
            return reward, not self.pile
        self.pile.append(pair[1])
        self.all.append(pair[1])
        self.shown, self.playing = pair[1], len(self.pile) == self.num_cards
        return 0.0, False

    def deck_is_fair(self):
        return all(
            self.all.count(kind) == self.num_cards // self.num_kinds
            for kind in range(self.num_kinds)
        )
