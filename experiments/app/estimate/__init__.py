"""Parts of `estimate.py`.

| file | in -> out | called by |
| --- | --- | --- |
| `moves.py` | two layouts -> bytes that one becomes the other by | `estimate.py` |
| `pipelines.py` | schedule -> idle time, memory of each stage | `estimate.py` |
| `report.py` | estimate -> tables, report.json, a picture of the memory | `estimate.py` |
"""
