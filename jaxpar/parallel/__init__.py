"""Layouts beyond a rule table.

| room | in -> out | called by |
|---|---|---|
| `context` | q, k, v [B, T, ...] split over T, what travels -> attention of the whole | users |
| `experts` | tokens of each expert, devices -> who computes what | users |
| `pipeline` | devices, microbatches, chunks, costs -> schedules; checked, timed, packed for one program | users |
| `placement` | two placements, a shape -> collectives; the array converted; chains | `experiments.estimate`, users |
| `controller` | functions, values and futures, meshes -> futures; an array moved to another mesh | users |
"""
