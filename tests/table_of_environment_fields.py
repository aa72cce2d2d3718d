"""What is legal of each number of each environment."""

from ranges_of_fields import COUNT, LEAST_0, PAIR, POSITIVE, SHARE, SIGNED, VIEW

from envs.arcade.mine_sweeper import MineSweeper
from envs.arcade.tetris import Tetris
from envs.grid import rooms
from envs.grid.rulesets import Tree
from envs.grid.survival import Survival
from envs.grid.xland import XLand
from envs.memory import card_games
from envs.multi import particles
from envs.multi.combat import Combat
from envs.multi.foraging import Foraging
from envs.pomdp.crowd import Crowd
from envs.pomdp.laser_tag import LaserTag
from envs.pomdp.light_dark import LightDark
from envs.pomdp.mars import Mars
from envs.pomdp.navigation import Navigation
from envs.pomdp.rocksample import RockSample
from envs.pomdp.sub_hunt import SubHunt
from envs.puzzles import (
    bin_pack,
    connector_boards,
    countdown,
    job_shop,
    knapsack,
    rubiks_cube,
    sliding_tile,
    sokoban_levels,
    tiles2048,
    tour_levels,
)

ENVIRONMENTS = {
    Combat: {"size": ((3,), (4,))},
    Crowd: {"width": ((2,), (3,)), "height num_people": COUNT, "reach layout": LEAST_0},
    Foraging: {"size": ((2,), (3,)), "num_agents num_food max_strength": COUNT, "sight": LEAST_0},
    tiles2048.Start: {"size": ((1, 9), (2, 8))},
    rubiks_cube.Scramble: {
        "size": ((1, 4), (2, 3)),
        "moves": ((0, 1001), (1, 1000)),
        "least": LEAST_0,
    },
    sliding_tile.Shuffle: {"size": ((1, 9), (2, 8))},
    sokoban_levels.ReversePlay: {
        "size": ((4, 33), (5, 32)),
        "boxes played": COUNT,
        "carved": ((7,), (8,)),
    },
    connector_boards.RandomWalks: {"size": ((2, 33), (3, 32)), "num_agents walked": COUNT},
    rooms.Empty: {"size": ((3,), (4,))},
    rooms.DoorKey: {"size": ((4,), (5,))},
    rooms.FourRooms: {"size": ((6,), (7,)), "max_steps": COUNT},
    rooms.Memory: {"size": ((6,), (7,))},
    rooms.GridWorld: {"view": VIEW},
    LaserTag: {"width height": PAIR, "num_obstacles layout start": LEAST_0},
    LightDark: {"radius big_step": COUNT, "light": SIGNED},
    Mars: {"size": ((2, 128), (3, 127)), "num_rocks": COUNT, "layout": LEAST_0},
    card_games.RepeatFirst: {"num_cards num_kinds": PAIR},
    card_games.RepeatPrevious: {"num_cards num_kinds": PAIR, "k": COUNT},
    card_games.CountRecall: {"num_cards num_kinds": PAIR},
    card_games.Autoencode: {"num_cards": PAIR, "num_kinds": ((1, 128), (2, 127))},
    MineSweeper: {"size": PAIR, "num_mines": COUNT},
    Tetris: {"width": ((3, 10), (4, 9))},
    Navigation: {"size": ((4, 16), (5, 15)), "num_obstacles layout": LEAST_0},
    particles.Spread: {"num_agents num_landmarks": COUNT},
    particles.Tag: {"num_chasers num_prey": COUNT, "num_obstacles": LEAST_0},
    countdown.Uniform: {"num_numbers": ((1, 9), (2, 8)), "low high least most": COUNT},
    countdown.Reverse: {"num_numbers": ((1, 9), (2, 8)), "low high most": COUNT},
    knapsack.Items: {"num_items": COUNT, "tightness": POSITIVE},
    knapsack.Integer: {"num_items most": COUNT, "share": POSITIVE},
    tour_levels.Uniform: {"num_places": PAIR},
    tour_levels.Clustered: {"num_places": PAIR, "num_clusters": COUNT, "spread": POSITIVE},
    tour_levels.Demands: {"capacity most": COUNT},
    bin_pack.Split: {"num_items": COUNT},
    bin_pack.BinPack: {"num_spaces": COUNT},
    job_shop.Random: {
        "num_jobs": COUNT,
        "num_machines": ((0, 65), (1, 64)),
        "longest": ((0, 10_001), (1, 10_000)),
    },
    RockSample: {"size num_rocks": COUNT, "layout": LEAST_0},
    Tree: {"depth distractors false_rules": LEAST_0, "prune": SHARE, "kinds": ((0, 12), (1, 11))},
    SubHunt: {"size": ((2,), (3,)), "speed": COUNT},
    Survival: {"size": ((15,), (16,)), "view": ((4,), (5,))},
    XLand: {"size": ((4,), (5,)), "rooms num_tasks": COUNT, "view": VIEW},
}
