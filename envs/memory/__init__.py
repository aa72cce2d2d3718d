"""Games that only memory wins.

| file | environments |
| --- | --- |
| `card_games.py` | RepeatFirst, RepeatPrevious, CountRecall, Autoencode |
| `masked_cart_pole.py` | CartPole seen in part or through noise |
"""
