"""Problems of combinatorics with exact answers on small instances; a `generator` says which instances are drawn.

| file | environments |
| --- | --- |
| `countdown.py` | Countdown, the game of 24; `expressions.py` and `answers.py` judge answers as text |
| `knapsack.py` | Knapsack |
| `tours.py` | TSP and CVRP, on maps of `tour_levels.py` |
| `job_shop.py` | JobShop |
| `bin_pack.py` | BinPack, in three dimensions |
| `arithmetic.py` | moves of Countdown: pairs of exact fractions |
| `rewards.py` | rewards at every step or at the end, of equal sum |
| `tiles2048.py` | 2048 |
| `rubiks_cube.py`, `sliding_tile.py` | RubiksCube of 2 and 3, SlidingTile |
| `sokoban.py` | Sokoban, on levels of `sokoban_levels.py` |
| `connector.py` | Connector, of several agents on boards of `connector_boards.py` |
| `given.py` | instances that are given, as a generator of any of these |
"""
