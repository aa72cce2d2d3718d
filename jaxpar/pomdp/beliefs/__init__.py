"""Beliefs: what is known of the state.

| file | in -> out | called by |
|---|---|---|
| `belief` | belief, action, observation -> belief, evidence; `Belief`, `BeliefUpdater` | planners |
| `exact_belief` | a finite model -> its chances `[S]` as weighted states | `simulate`, `exact` |
"""
