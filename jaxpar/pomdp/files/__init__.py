"""Models and policies in other people's files.

| file | in -> out | called by |
|---|---|---|
| `cassandra` | a `.POMDP` file <-> `TabularPomdp` | experiments, users |
| `pomdpx`, `_xml` | a POMDPX file <-> `TabularPomdp` | users |
| `policies` | a `.policy` or `.alpha` file <-> `Exact` | users |
"""
