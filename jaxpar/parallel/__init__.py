"""Layouts beyond a rule table.

file         | in -> out                                                    | called by
-------------|--------------------------------------------------------------|----------------------
placement.py | two placements, a shape -> the cheapest collectives between  | users, the files below
convert.py   | an array at rest in one placement -> the same in another     | users
chain.py     | placements of x, w1, w2, ... -> the cheapest plan of x@w1@w2 | users
transfer.py  | an array on one mesh -> the same on another                  | users, the file below
dataflow.py  | a function, values and futures, a mesh -> a future           | users
"""
