//! Maximum flow (Dinic's method), for the partition's minimum cut.

/// The capacity of an edge that no cut may contain.
pub(crate) const UNLIMITED: u64 = u64::MAX / 4;

struct Edge {
    to: usize,
    left: u64,
}

/// A network; edges come in pairs, each the other's reverse.
pub(crate) struct Flow {
    edges: Vec<Edge>,
    from: Vec<Vec<usize>>,
}

impl Flow {
    pub(crate) fn new(points: usize) -> Flow {
        Flow { edges: Vec::new(), from: vec![Vec::new(); points] }
    }

    pub(crate) fn edge(&mut self, from: usize, to: usize, capacity: u64) {
        self.from[from].push(self.edges.len());
        self.edges.push(Edge { to, left: capacity });
        self.from[to].push(self.edges.len());
        self.edges.push(Edge { to: from, left: 0 });
    }

    /// The points on the sink's side of the minimum cut nearest to it.
    pub(crate) fn sink_side(&mut self, source: usize, sink: usize) -> Vec<bool> {
        loop {
            let level = self.levels(source);
            if level[sink].is_none() {
                break;
            }
            let mut next = vec![0; self.from.len()];
            while self.augment(source, sink, &level, &mut next) > 0 {}
        }
        // Who can still reach the sink.
        let mut side = vec![false; self.from.len()];
        side[sink] = true;
        let mut queue = vec![sink];
        while let Some(point) = queue.pop() {
            for &edge in &self.from[point] {
                let before = self.edges[edge].to;
                if !side[before] && self.edges[edge ^ 1].left > 0 {
                    side[before] = true;
                    queue.push(before);
                }
            }
        }
        side
    }

    /// Distances from the source over edges with capacity left.
    fn levels(&self, source: usize) -> Vec<Option<u32>> {
        let mut level = vec![None; self.from.len()];
        level[source] = Some(0);
        let mut queue = std::collections::VecDeque::from([source]);
        while let Some(point) = queue.pop_front() {
            for &edge in &self.from[point] {
                let to = self.edges[edge].to;
                if self.edges[edge].left > 0 && level[to].is_none() {
                    level[to] = level[point].map(|l| l + 1);
                    queue.push_back(to);
                }
            }
        }
        level
    }

    /// Sends flow along one shortest path; returns how much. Without recursion: paths are as long as the
    /// program is deep.
    fn augment(&mut self, source: usize, sink: usize, level: &[Option<u32>], next: &mut [usize]) -> u64 {
        let mut path: Vec<usize> = Vec::new();
        let mut point = source;
        while point != sink {
            let step = self.from[point][next[point]..].iter().position(|&edge| {
                self.edges[edge].left > 0 && level[self.edges[edge].to] == level[point].map(|l| l + 1)
            });
            match step {
                Some(skip) => {
                    next[point] += skip;
                    let edge = self.from[point][next[point]];
                    path.push(edge);
                    point = self.edges[edge].to;
                }
                None => {
                    // A dead end: step back and don't come here again.
                    next[point] = self.from[point].len();
                    match path.pop() {
                        Some(edge) => {
                            point = self.edges[edge ^ 1].to;
                            next[point] += 1;
                        }
                        None => return 0,
                    }
                }
            }
        }
        let amount = path.iter().map(|&edge| self.edges[edge].left).min().unwrap_or(0);
        for edge in path {
            self.edges[edge].left -= amount;
            self.edges[edge ^ 1].left += amount;
        }
        amount
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cut_nearest_to_the_sink_is_found() {
        // 0 → 1 → 2 → 3 with two equal bottlenecks.
        let mut flow = Flow::new(4);
        flow.edge(0, 1, 5);
        flow.edge(1, 2, 9);
        flow.edge(2, 3, 5);
        assert_eq!(flow.sink_side(0, 3), [false, false, false, true]);
        let mut flow = Flow::new(4);
        flow.edge(0, 1, 5);
        flow.edge(0, 2, 2);
        flow.edge(1, 3, UNLIMITED);
        flow.edge(2, 3, UNLIMITED);
        assert_eq!(flow.sink_side(0, 3), [false, true, true, true]);
    }
}
