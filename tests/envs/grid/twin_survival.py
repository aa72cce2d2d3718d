"""The rules of survival written as ordinary loops; what a step draws is handed in."""

import numpy as np

GRASS, SAND, WATER, STONE, TREE, PATH, COAL, IRON, DIAMOND, TABLE, FURNACE = range(1, 12)
STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
GOODS = ("wood", "stone", "coal", "iron", "diamond")
TOOLS = (
    "wooden_pickaxe",
    "stone_pickaxe",
    "iron_pickaxe",
    "wooden_sword",
    "stone_sword",
    "iron_sword",
)
PLACES = {
    7: ("stone", STONE, {"stone": 1}),
    8: ("table", TABLE, {"wood": 3}),
    9: ("furnace", FURNACE, {"stone": 2}),
}
COSTS = {
    "wooden": {"wood": 1},
    "stone": {"wood": 1, "stone": 1},
    "iron": {"wood": 1, "coal": 1, "iron": 1},
}
GATHERED = {
    TREE: ("wood", None),
    STONE: ("stone", "wooden_pickaxe"),
    COAL: ("coal", "wooden_pickaxe"),
    IRON: ("iron", "stone_pickaxe"),
    DIAMOND: ("diamond", "iron_pickaxe"),
}


class SurvivalTwin:
    """A state of `envs.grid.survival`."""

    def __init__(self, state, params):
        self.ground = np.asarray(state.terrain).tolist()
        self.size, self.p = len(self.ground), params
        self.at = divmod(int(state.cell), self.size)
        self.facing = int(state.facing)
        self.health, self.food, self.drink, self.energy = (int(need) for need in state.needs)
        self.have = dict(zip((*GOODS, *TOOLS), (int(x) for x in state.inventory), strict=True))
        self.asleep, self.time = bool(state.asleep), int(state.time)
        self.beings = [
            dict(cow=i < 4, at=divmod(int(cell), self.size), life=int(life), rest=int(rest))
            for i, (cell, life, rest) in enumerate(
                zip(state.creatures, state.vigour, state.rest, strict=True)
            )
        ]
        self.done = set(np.flatnonzero(state.achieved).tolist())

    def ahead(self, facing):
        return self.at[0] + STEPS[facing][0], self.at[1] + STEPS[facing][1]

    def being(self, cell):
        return next(
            (being for being in self.beings if being["life"] > 0 and being["at"] == cell), None
        )

    def kind(self, cell):
        return self.ground[cell[0]][cell[1]]

    def free(self, cell):
        return self.kind(cell) in (GRASS, SAND, PATH) and self.being(cell) is None

    def near(self, kind):
        row, column = self.at
        return any(
            self.kind((row + down, column + right)) == kind
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
        )

    def affords(self, costs):
        return all(self.have[good] >= amount for good, amount in costs.items())

    def legal(self, action):
        front = self.ahead(self.facing)
        kind = self.kind(front)
        if action == 0:
            return True
        if self.asleep:
            return False
        if action <= 4:
            return self.facing != action - 1 or self.free(self.ahead(action - 1))
        if action == 5:
            if self.being(front) is not None:
                return True
            if kind in GATHERED:
                good, tool = GATHERED[kind]
                return self.have[good] < 9 and (tool is None or self.have[tool] > 0)
            return kind == WATER and self.drink < 9
        if action == 6:
            return self.energy < 9
        if action <= 9:
            edge = 0 in front or self.size - 1 in front
            over_water = action == 7 and kind == WATER and self.being(front) is None and not edge
            return (self.free(front) or over_water) and self.affords(PLACES[action][2])
        tool = TOOLS[action - 10]
        material = tool.split("_")[0]
        return (
            self.have[tool] == 0
            and self.near(TABLE)
            and (material != "iron" or self.near(FURNACE))
            and self.affords(COSTS[material])
        )

    def act(self, action):
        """A legal action."""
        if 1 <= action <= 4:
            self.facing = action - 1
            if self.free(self.ahead(self.facing)):
                self.at = self.ahead(self.facing)
        elif action == 5:
            self.use(self.ahead(self.facing))
        elif action == 6:
            self.asleep = True
        elif 7 <= action <= 9:
            _, kind, costs = PLACES[action]
            row, column = self.ahead(self.facing)
            self.ground[row][column] = kind
            self.pay(costs, action)
        elif action >= 10:
            tool = TOOLS[action - 10]
            self.have[tool] = 1
            self.pay(COSTS[tool.split("_")[0]], action)

    def pay(self, costs, action):
        for good, amount in costs.items():
            self.have[good] -= amount
        self.done.add(action + 1)

    def use(self, front):
        being = self.being(front)
        if being is not None:
            swords = [self.have[tool] for tool in TOOLS[3:]]
            being["life"] -= 5 if swords[2] else 3 if swords[1] else 2 if swords[0] else 1
            if being["life"] <= 0:
                being["life"] = 0
                if being["cow"]:
                    self.food = min(self.food + 6, 9)
                self.done.add(6 if being["cow"] else 7)
        elif self.kind(front) == WATER:
            self.drink += 1
            self.done.add(5)
        else:
            good, _ = GATHERED[self.kind(front)]
            self.have[good] += 1
            self.done.add(GOODS.index(good))
            if good != "wood":
                self.ground[front[0]][front[1]] = PATH

    def tenth(self):
        return self.time % self.p.day * 10 // self.p.day

    def live(self, being, direction, chance, offset):
        """One creature; the pain it gives."""
        pain, before = 0, being["at"]
        down, right = self.at[0] - before[0], self.at[1] - before[1]
        far = max(abs(down), abs(right))
        alive = being["life"] > 0 and far <= 16
        goal = None
        if alive:
            if not being["cow"] and far <= 8 and chance < self.p.chase:
                direction = (
                    (1 if down > 0 else 3) if abs(down) > abs(right) else (0 if right > 0 else 2)
                )
                goal = before[0] + STEPS[direction][0], before[1] + STEPS[direction][1]
            elif chance >= 256 - self.p.wander:
                goal = before[0] + STEPS[direction][0], before[1] + STEPS[direction][1]
        else:
            night = self.tenth() >= 6
            rate = (
                self.p.cow_rate
                if being["cow"]
                else self.p.night_rate
                if night
                else self.p.zombie_rate
            )
            cell = self.at[0] + offset[0], self.at[1] + offset[1]
            if (
                chance < rate
                and all(0 <= x < self.size for x in cell)
                and max(map(abs, offset)) >= 4
            ):
                goal = cell
        goes = (
            goal is not None
            and goal != self.at
            and self.being(goal) is None
            and self.kind(goal) == GRASS
        )
        if goes:
            being["at"] = goal
        if not alive:
            being["life"] = (3 if being["cow"] else 5) if goes else 0
        if not being["cow"] and alive and abs(down) + abs(right) == 1 and being["rest"] == 0:
            pain = self.p.night_bite if self.asleep else self.p.bite
            being["rest"] = 5
        return pain

    def step(self, action, drawn):
        """Reward, and whether the agent died."""
        health, done = self.health, set(self.done)
        if self.legal(action):
            self.act(action)
        pain = 0
        for being in self.beings:
            being["rest"] = max(being["rest"] - 1, 0)
        for i, being in enumerate(self.beings):
            offset = int(drawn.down[i]), int(drawn.right[i])
            pain += self.live(being, int(drawn.direction[i]), int(drawn.chance[i]), offset)
        self.time += 1
        self.food = max(self.food - (self.time % self.p.food_every == 0), 0)
        self.drink = max(self.drink - (self.time % self.p.drink_every == 0), 0)
        if self.asleep:
            self.energy = min(self.energy + (self.time % self.p.sleep_every == 0), 9)
        else:
            self.energy = max(self.energy - (self.time % self.p.energy_every == 0), 0)
        if self.time % self.p.heal_every == 0:
            self.health += 1 if min(self.food, self.drink, self.energy) > 0 else -1
        self.health = min(max(self.health - pain, 0), 9)
        if self.energy == 9 or self.health < health:
            self.asleep = False
        reward = len(self.done - done) + self.p.health_reward * (self.health - health)
        return reward, self.health == 0

    def observe(self, view):
        half, tenth = view // 2, self.tenth()
        reach = 0 if self.asleep else half - {6: 1, 7: 2, 8: 2, 9: 1}.get(tenth, 0)
        image = np.zeros((view, view, 2), np.uint8)
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                row, column = self.at[0] + down, self.at[1] + right
                inside = 0 <= row < self.size and 0 <= column < self.size
                being = self.being((row, column))
                image[down + half, right + half] = (
                    self.ground[row][column] if inside else WATER,
                    0 if being is None else 1 if being["cow"] else 2,
                )
        status = [self.health, self.food, self.drink, self.energy, *self.have.values()]
        return image, np.array([*status, self.facing, self.asleep, tenth], np.uint8)
