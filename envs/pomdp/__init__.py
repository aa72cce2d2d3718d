"""Problems of planning under uncertainty: each gives the likelihood of what is observed.

| file | environments |
| --- | --- |
| `tiger.py` | the tiger behind one of two doors |
| `baby.py` | the crying baby |
| `rocksample.py` | a rover among rocks |
| `mars.py` | two rovers among the same rocks |
| `tag.py` | an opponent that is seen only when it is met |
| `laser_tag.py` | the same, with eight noisy beams |
| `navigation.py` | a gate and obstacles that no map shows |
| `light_dark.py` | look around in the light, stop in the dark |
| `sub_hunt.py` | a submarine that may be warned |
| `crowd.py` | a hall of curious and shy people |
"""
