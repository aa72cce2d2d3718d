"""Layouts beyond a rule table.

file          | in -> out                                                   | called by
--------------|-------------------------------------------------------------|----------------
placement.py  | two placements of an array -> the collectives between them  | users, chain.py
chain.py      | placements of x, w1, w2, ... -> the cheapest plan of x@w1@w2 | users
"""
