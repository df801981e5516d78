"""``scripts/gpu_check``: the engine checked and measured on a GPU, in at most nine minutes.

| file | what it holds |
| --- | --- |
| ``steps.py`` | the steps, in order, and the seconds that each is given |
| ``environment.py`` | packages and room that the steps need |
| ``runner.py`` | the parent: starts the worker, keeps limits, writes the JSON, prints the table |
| ``worker.py`` | the child that runs the steps |
| ``lab.py`` | what a step is handed: sizes, device, models, the report |
| ``forms.py`` | the two sizes of everything: true configurations, and tiny ones |
| ``timing.py`` | medians, transfers and the bandwidth limit |
| ``transformers_peer.py`` | the same model as transformers runs it |
| all others | the steps themselves |
"""
