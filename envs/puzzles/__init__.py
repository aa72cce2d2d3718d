"""Problems of combinatorics with exact answers on small instances; a `generator` says which instances are drawn.

| file | environments |
| --- | --- |
| `given.py` | instances that are given, as a generator of any of these |
"""
