"""Layouts beyond a rule table.

| room | in -> out | called by |
|---|---|---|
| `placement` | two placements, a shape -> the collectives between; the array converted; plans of chains | users |
| `controller` | functions, values and futures, meshes -> futures; an array moved to another mesh | users |
"""
