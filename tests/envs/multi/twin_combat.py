"""The grid combat as a list of dictionaries and loops, with its scripted team."""

STEPS = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]
FULL = {"melee": 12, "ranged": 8, "healer": 8}
POWER = {"melee": 3, "ranged": 2, "healer": 2}
REACH = {"melee": 1, "ranged": 4, "healer": 3}
PAUSE = {"melee": 1, "ranged": 2, "healer": 1}
SIGHT = {"melee": 4, "ranged": 6, "healer": 5}


class CombatTwin:
    """One episode from positions that are handed in."""

    def __init__(self, first, second, size, position):
        """Everybody whole and ready."""
        self.size, self.larger = size, max(len(first), len(second))
        self.units = []
        for i, kind in enumerate(first + second):
            team = int(i >= len(first))
            place = int(position[i][0]), int(position[i][1])
            self.units.append(
                {"id": i, "kind": kind, "team": team, "at": place, "health": FULL[kind], "pause": 0}
            )

    def team(self, number):
        """All of one team, living or dead."""
        return [unit for unit in self.units if unit["team"] == number]

    def choices(self, unit):
        """Those on whom a unit may choose to act, in the order of its actions."""
        return self.team(unit["team"] if unit["kind"] == "healer" else 1 - unit["team"])

    @staticmethod
    def king(a, b):
        """King's moves between two cells."""
        return max(abs(a[0] - b[0]), abs(a[1] - b[1]))

    def legal(self, unit):
        """The set of a unit's legal actions."""
        if unit["health"] == 0:
            return {0}
        taken = {other["at"] for other in self.units if other["health"] > 0}
        allowed = {0}
        for a in (1, 2, 3, 4):
            cell = unit["at"][0] + STEPS[a][0], unit["at"][1] + STEPS[a][1]
            if 0 <= cell[0] < self.size and 0 <= cell[1] < self.size and cell not in taken:
                allowed.add(a)
        for j, other in enumerate(self.choices(unit)):
            if (
                unit["pause"]
                or not other["health"]
                or self.king(unit["at"], other["at"]) > REACH[unit["kind"]]
            ):
                continue
            mends = unit["kind"] == "healer"
            if not mends or (other is not unit and other["health"] < FULL[other["kind"]]):
                allowed.add(5 + j)
        return allowed

    def script(self, team):
        """The actions of a scripted team."""
        actions, claimed = [], []
        for unit in self.team(team):
            allowed = self.legal(unit)
            choices = self.choices(unit)
            acts = [a for a in sorted(allowed) if a >= 5]
            if acts:
                actions.append(min(acts, key=lambda a: choices[a - 5]["health"]))
                continue
            actions.append(self.walk(unit, allowed, choices, claimed))
        return actions

    def walk(self, unit, allowed, choices, claimed):
        """Where a unit goes that cannot act; `claimed` collects the cells that those before it chose."""
        others = [other for other in choices if other["health"] > 0 and other is not unit]
        if not others or unit["health"] == 0:
            return 0

        def manhattan(a, b):
            return abs(a[0] - b[0]) + abs(a[1] - b[1])

        hurt = [
            other
            for other in others
            if unit["kind"] == "healer" and other["health"] < FULL[other["kind"]]
        ]
        if hurt:
            goal = min(hurt, key=lambda other: other["health"])
        else:
            goal = min(others, key=lambda other: manhattan(unit["at"], other["at"]))

        def cost(a):
            cell = unit["at"][0] + STEPS[a][0], unit["at"][1] + STEPS[a][1]
            wrong = abs(self.king(cell, goal["at"]) - REACH[unit["kind"]])
            return wrong * 4 * self.size + manhattan(cell, goal["at"])

        action = min((a for a in sorted(allowed) if a < 5), key=cost)
        cell = unit["at"][0] + STEPS[action][0], unit["at"][1] + STEPS[action][1]
        if action and cell in claimed:
            return 0
        if action:
            claimed.append(cell)
        return action

    def over(self):
        """Whether a team is dead."""
        return any(not any(unit["health"] for unit in self.team(number)) for number in (0, 1))

    def lead(self):
        """Own health minus the opponents', as fractions, for the first team, and its win or loss."""
        share = []
        for number in (0, 1):
            team = self.team(number)
            share.append(sum(u["health"] for u in team) / sum(FULL[u["kind"]] for u in team))
        return share[0] - share[1] + ((share[0] > 0) - (share[1] > 0) if self.over() else 0)

    def step(self, actions):
        """Takes the actions of all units; returns what each earns."""
        living, before = [unit["health"] > 0 for unit in self.units], self.lead()
        change, wanted = [0] * len(self.units), [unit["at"] for unit in self.units]
        for unit, action in zip(self.units, actions, strict=True):
            action = int(action) if action in self.legal(unit) else 0
            unit["next"] = max(unit["pause"] - 1, 0)
            if action >= 5:
                target = self.choices(unit)[action - 5]
                change[target["id"]] += POWER[unit["kind"]] * (
                    1 if unit["kind"] == "healer" else -1
                )
                unit["next"] = PAUSE[unit["kind"]]
            else:
                wanted[unit["id"]] = (
                    unit["at"][0] + STEPS[action][0],
                    unit["at"][1] + STEPS[action][1],
                )
        movers = [i for i, unit in enumerate(self.units) if wanted[i] != unit["at"]]
        for i in movers:
            if sum(wanted[j] == wanted[i] for j in movers) == 1:
                self.units[i]["at"] = wanted[i]
        for unit in self.units:
            unit["health"] = min(max(unit["health"] + change[unit["id"]], 0), FULL[unit["kind"]])
            unit["pause"] = unit.pop("next")
        gain = self.lead() - before
        signs = [1 - 2 * unit["team"] for unit in self.units]
        return [sign * gain if alive else 0.0 for sign, alive in zip(signs, living, strict=True)]

    def view(self, unit):
        """The row that a unit sees."""
        blank = [0.0] * 8
        slots = 2 * self.larger - 1
        if unit["health"] == 0:
            return [0.0] * 7 + blank * slots

        def kind(other):
            return [float(other["kind"] == name) for name in FULL]

        def numbers(other):
            return [other["health"] / FULL[other["kind"]], other["pause"] / PAUSE[other["kind"]]]

        sight = SIGHT[unit["kind"]]

        def rows(group, count):
            out = []
            for other in group:
                offset = other["at"][0] - unit["at"][0], other["at"][1] - unit["at"][1]
                shown = other["health"] > 0 and max(abs(offset[0]), abs(offset[1])) <= sight
                out += (
                    [1.0, offset[0] / sight, offset[1] / sight, *numbers(other), *kind(other)]
                    if shown
                    else blank
                )
            return out + blank * (count - len(group))

        own = [
            unit["at"][0] / (self.size - 1),
            unit["at"][1] / (self.size - 1),
            *numbers(unit),
            *kind(unit),
        ]
        fellows = [other for other in self.team(unit["team"]) if other is not unit]
        return own + rows(fellows, self.larger - 1) + rows(self.team(1 - unit["team"]), self.larger)
