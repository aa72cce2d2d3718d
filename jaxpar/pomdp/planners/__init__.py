"""Online planners: a tree of what may follow a belief, grown by many simulations at once.

| file | in -> out | called by |
|---|---|---|
| `tree`, `adding`, `_loops` | (node, action), (edge, observation) -> ids, statistics | planners |
| `planner`, `clock` | start, grow, decide -> `plan`, `search`; `plan_until` a deadline | planners |
| `simulations`, `leaves` | belief -> n simulations at the root; states -> values | searches |
| `tree_search`, `vopp`, `pomcp` | parts, belief -> a tree of nodes; action, report | users |
| `particle_search`, `widening`, `pft`, `pomcpow` | the same of particle sets `[N, m]` | users |
| `scenarios`, `scenario_tree`, `despot` | K scenarios -> a sparse tree with bounds; action | users |
| `root_parallel`, `outline` | W trees -> action; a tree -> its branches as text | users |
"""
