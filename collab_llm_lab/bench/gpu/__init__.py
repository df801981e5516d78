"""``scripts/gpu_check``: the engine checked and measured on a GPU, in at most nine minutes.

| file | contents |
| --- | --- |
| ``environment.py`` | packages and room that the steps need |
| ``runner.py`` | the steps, and the parent: limits, JSON and table |
| ``command.py`` | ``collab-llm bench gpu`` |
| ``worker.py`` | the child that runs the steps |
| ``lab.py`` | the argument of each step: sizes, device, models, the report |
| ``forms.py`` | the two sizes of everything: true configurations, and tiny ones |
| ``timing.py`` | medians, transfers and the bandwidth limit |
| ``transformers_peer.py`` | the same model as transformers runs it |
| all others | the steps themselves |
"""
