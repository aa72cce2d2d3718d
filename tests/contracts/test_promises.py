"""Every environment keeps its promises; the large families have a file of their own."""

from environment_rows import ALL, LARGE, each_row

import envs
from jaxpar.env import check_environment


@each_row([family for family in ALL if family not in LARGE])
def test_promises_hold(name):
    env, params = envs.make(name)
    report = check_environment(env, params, num_envs=4, num_steps=50)
    assert report.steps == 200 and {"identity", "types", "walk"} <= set(report.checks)
