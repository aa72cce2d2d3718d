"""Commands of single papers: `python -m experiments.papers.trading`, or, installed, `jaxpar papers trading`.

Nothing else imports them, and they may use `jaxpar.experimental`.
"""
