//! Whether one unit waits for another through a third, asked again and again while units become one.
//!
//! Every unit has a level above those of all units it waits for, so a search for a unit ends at its level.

use crate::fuse::merge::find;

/// A search through more units than this ends: units so far apart are not made one.
const FARTHEST: usize = 1000;

pub(crate) struct Reach {
    level: Vec<u32>,
    /// Who waits for a unit directly.
    users: Vec<Vec<usize>>,
    /// The search in which a unit was seen last.
    seen: Vec<u32>,
    search: u32,
    todo: Vec<usize>,
}

impl Reach {
    pub fn new(deps: &[Vec<usize>]) -> Reach {
        let mut users = vec![Vec::new(); deps.len()];
        for (unit, list) in deps.iter().enumerate() {
            for &d in list {
                users[d].push(unit);
            }
        }
        let mut this = Reach {
            level: vec![0; deps.len()],
            users,
            seen: vec![0; deps.len()],
            search: 0,
            todo: Vec::new(),
        };
        // Units in an order in which each comes after what it waits for.
        let mut waiting: Vec<usize> = deps.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = (0..deps.len()).filter(|&u| waiting[u] == 0).collect();
        while let Some(unit) = ready.pop() {
            for &user in &this.users[unit] {
                this.level[user] = this.level[user].max(this.level[unit] + 1);
                waiting[user] -= 1;
                if waiting[user] == 0 {
                    ready.push(user);
                }
            }
        }
        debug_assert!(waiting.iter().all(|&count| count == 0), "units wait for each other");
        this
    }

    /// Whether one of two units waits for the other through a third. `into` says which unit a unit is part of.
    pub fn between(&mut self, deps: &[Vec<usize>], into: &[usize], a: usize, b: usize) -> bool {
        let (from, to) = if self.level[a] > self.level[b] { (a, b) } else { (b, a) };
        if self.level[from] == self.level[to] {
            return false;
        }
        self.search += 1;
        self.todo.clear();
        self.todo.extend(deps[from].iter().map(|&d| find(into, d)).filter(|&d| d != to && d != from));
        let mut left = FARTHEST;
        while let Some(unit) = self.todo.pop() {
            if self.level[unit] <= self.level[to] || self.seen[unit] == self.search {
                continue;
            }
            self.seen[unit] = self.search;
            left -= 1;
            if left == 0 {
                return true;
            }
            for &d in &deps[unit] {
                let d = find(into, d);
                if d == to {
                    return true;
                }
                self.todo.push(d);
            }
        }
        false
    }

    /// Takes note that `other` is part of `unit` now, and `into` says so.
    pub fn join(&mut self, into: &[usize], unit: usize, other: usize) {
        let users = std::mem::take(&mut self.users[other]);
        self.users[unit].extend(users);
        self.level[unit] = self.level[unit].max(self.level[other]);
        let mut todo = vec![unit];
        while let Some(low) = todo.pop() {
            for u in 0..self.users[low].len() {
                let user = find(into, self.users[low][u]);
                if user != low && self.level[user] <= self.level[low] {
                    self.level[user] = self.level[low] + 1;
                    todo.push(user);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_unit_lies_between() {
        // 3 waits for 1 and 2, those for 0; 4 waits for nobody.
        let deps = vec![vec![], vec![0], vec![0], vec![0, 1, 2], vec![]];
        let mut into: Vec<usize> = (0..5).collect();
        let mut reach = Reach::new(&deps);
        assert!(reach.between(&deps, &into, 3, 0) && reach.between(&deps, &into, 0, 3));
        assert!(!reach.between(&deps, &into, 1, 0) && !reach.between(&deps, &into, 1, 2));
        assert!(!reach.between(&deps, &into, 4, 3));
        // 4 becomes part of 3: what is between 3 and 0 is between 4 and 0.
        into[3] = 4;
        let deps = vec![vec![], vec![0], vec![0], vec![], vec![0, 1, 2]];
        reach.join(&into, 4, 3);
        assert!(reach.between(&deps, &into, 0, 4) && !reach.between(&deps, &into, 4, 1));
    }

    #[test]
    fn levels_rise_behind_a_union() {
        // 1 waits for 0; 3 for 2, and 2 becomes one with 1: now 3 waits for 0 through it.
        let deps = vec![vec![], vec![0], vec![], vec![2]];
        let mut reach = Reach::new(&deps);
        let into = vec![0, 1, 1, 3];
        reach.join(&into, 1, 2);
        assert!(reach.between(&deps, &into, 3, 0));
    }
}
