"""Parts that commands share: their start and end, their folders, their output.

| file | in -> out | called by |
| --- | --- | --- |
| `runner.py` | flags -> configuration, run folder, devices and mesh | every command that keeps a run |
| `small_commands.py` | flags -> configuration | commands of a few flags |
| `harness.py` | algorithm, batches, run -> result, by checkpoints, metrics and progress | what trains |
| `run_folder.py` `saved_runs.py` | one run at a time has a folder; a folder -> its state | commands |
| `mesh_flags.py` `solver_flags.py` | flags -> layout, method of a recurrence | commands |
| `mistakes.py` `help_text.py` | an error -> one sentence; a configuration -> `--help` | `runner.py` |
| `interrupts.py` `silence.py` | Ctrl-C at any moment; no silence over five seconds | `runner.py` |
| `own_models.py` | models of flax's own layers in three functions each | `own.py` |
| `lm/` `sequences/` `env/` `estimate/` | texts; series and tasks; policies and films; reports | commands |
"""
