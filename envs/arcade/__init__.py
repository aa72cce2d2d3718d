"""Small games in pixels, each with a fully and a partially observed twin of one state.

| file | environments |
| --- | --- |
| `games.py` | Catcher, Skittles, Navigator, BattleShip |
| `tetris.py` | Tetris |
| `pixels.py` | Autoencode, CountRecall, CartPole and NoisyCartPole of `memory`, drawn |
| `mine_sweeper.py` | MineSweeper |
| `brick_breaker.py` | BrickBreaker |
| `sprites.py` | the bitmaps from which they, and the card games, are drawn |
"""
