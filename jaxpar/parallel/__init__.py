"""Layouts beyond a rule table.

file         | in -> out                                                    | called by
-------------|--------------------------------------------------------------|----------------------
transfer.py  | an array on one mesh -> the same on another                  | users, the file below
dataflow.py  | a function, values and futures, a mesh -> a future           | users
"""
