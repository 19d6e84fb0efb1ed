//! Where temporaries lie: those that are not in use at the same time share memory, in the arena or in what is
//! going to be an output.

pub(crate) mod temporaries;

/// Bytes needed over a range of steps, both ends included.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Lifetime {
    pub bytes: usize,
    pub first: usize,
    pub last: usize,
    /// The result takes over this room's memory, so it must lie at its beginning.
    pub becomes: Option<usize>,
}

/// Memory of an output: nobody needs it before the output's first step.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Room {
    pub bytes: usize,
    pub until: usize,
}

/// Where a temporary lies.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) enum Spot {
    /// In the arena, at this byte.
    Arena(usize),
    /// In a room, at this byte.
    Room { room: usize, offset: usize },
}

/// Offsets are multiples of this: the size of a cache line and of the widest vector.
const ALIGN: usize = 64;
/// With more temporaries than this, one way of placing them must do.
const MANY: usize = 1500;

/// In which order temporaries are placed.
#[derive(Copy, Clone)]
enum Turn {
    Largest,
    /// Bytes times steps.
    LargestArea,
    Earliest,
}

/// Which of the gaps that are large enough is taken.
#[derive(Copy, Clone, PartialEq)]
enum Fit {
    Lowest,
    Tightest,
}

/// A spot for every lifetime, and the arena's size: the best of several ways of placing them.
pub(crate) fn place(lifetimes: &[Lifetime], rooms: &[Room]) -> (Vec<Spot>, usize) {
    let ways = [
        (Turn::Largest, Fit::Lowest),
        (Turn::Largest, Fit::Tightest),
        (Turn::LargestArea, Fit::Tightest),
        (Turn::Earliest, Fit::Tightest),
    ];
    let mut best = placed(lifetimes, rooms, ways[0].0, ways[0].1);
    let tries = if lifetimes.len() > MANY { 1 } else { ways.len() };
    let least = least(lifetimes, rooms);
    for &(turn, fit) in &ways[1..tries] {
        if best.1 <= least {
            break;
        }
        let other = placed(lifetimes, rooms, turn, fit);
        if other.1 < best.1 {
            best = other;
        }
    }
    best
}

/// No arena can be smaller: at some step this much is needed beside all room there is.
fn least(lifetimes: &[Lifetime], rooms: &[Room]) -> usize {
    let steps = lifetimes.iter().map(|life| life.last + 1).max().unwrap_or(0);
    let mut change = vec![0i64; steps + 1];
    for life in lifetimes {
        let bytes = life.bytes.next_multiple_of(ALIGN) as i64;
        change[life.first] += bytes;
        // In its last step it is the output.
        change[life.last + usize::from(life.becomes.is_none())] -= bytes;
    }
    for room in rooms {
        let bytes = room.bytes.next_multiple_of(ALIGN) as i64;
        change[0] -= bytes;
        change[room.until.min(steps)] += bytes;
    }
    let (mut now, mut most) = (0, 0);
    for &step in &change[..steps] {
        now += step;
        most = most.max(now);
    }
    most as usize
}

fn placed(lifetimes: &[Lifetime], rooms: &[Room], turn: Turn, fit: Fit) -> (Vec<Spot>, usize) {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    let steps = |i: usize| lifetimes[i].last - lifetimes[i].first + 1;
    order.sort_by_key(|&i| {
        let life = &lifetimes[i];
        let key = match turn {
            Turn::Largest => usize::MAX - life.bytes,
            Turn::LargestArea => usize::MAX - life.bytes.saturating_mul(steps(i)),
            Turn::Earliest => life.first,
        };
        // Whoever has no choice comes first.
        (life.becomes.is_none(), key, usize::MAX - life.bytes)
    });
    let mut spots = vec![Spot::Arena(0); lifetimes.len()];
    // By room, then for the arena: lifetimes and where they begin.
    let mut taken: Vec<Vec<(usize, usize)>> = vec![Vec::new(); rooms.len() + 1];
    let mut total = 0;
    for i in order {
        let life = &lifetimes[i];
        if life.bytes == 0 {
            continue;
        }
        if let Some(room) = life.becomes {
            spots[i] = Spot::Room { room, offset: 0 };
            taken[room].push((i, 0));
            continue;
        }
        let mut best: Option<(usize, usize, usize)> = None;
        for (space, inside) in taken.iter().enumerate() {
            let limit = match rooms.get(space) {
                Some(room) if life.last >= room.until || life.bytes > room.bytes => continue,
                Some(room) => room.bytes,
                None => usize::MAX,
            };
            let Some((offset, gap)) = gap(lifetimes, inside, life, limit, fit) else { continue };
            // The arena only where no room is left, or where it is not made larger.
            let worth = if space == rooms.len() && offset + life.bytes > total { usize::MAX } else { gap };
            if best.is_none_or(|(known, _, _)| worth < known) {
                best = Some((worth, space, offset));
            }
        }
        let (_, space, offset) = best.unwrap_or((0, rooms.len(), total));
        taken[space].push((i, offset));
        spots[i] = if space == rooms.len() {
            total = total.max((offset + life.bytes).next_multiple_of(ALIGN));
            Spot::Arena(offset)
        } else {
            Spot::Room { room: space, offset }
        };
    }
    (spots, total)
}

/// Where a lifetime fits into a space of `limit` bytes beside what is there already, and how large the gap is.
fn gap(
    lifetimes: &[Lifetime],
    inside: &[(usize, usize)],
    life: &Lifetime,
    limit: usize,
    fit: Fit,
) -> Option<(usize, usize)> {
    let meets = |other: &Lifetime| other.first <= life.last && life.first <= other.last;
    let mut taken: Vec<(usize, usize)> = inside
        .iter()
        .filter(|&&(other, _)| meets(&lifetimes[other]))
        .map(|&(other, at)| (at, at + lifetimes[other].bytes))
        .collect();
    taken.sort_unstable();
    let mut best: Option<(usize, usize)> = None;
    let mut at = 0;
    for (from, to) in taken.into_iter().chain([(limit, limit)]) {
        if at + life.bytes <= from {
            let gap = from - at;
            if best.is_none_or(|(_, known)| fit == Fit::Tightest && gap < known) {
                best = Some((at, gap));
            }
        }
        if to == limit {
            break;
        }
        at = at.max(to.next_multiple_of(ALIGN));
    }
    best
}

/// The longest stretch of `total` bytes outside of these ranges.
pub(crate) fn widest_gap(mut taken: Vec<(usize, usize)>, total: usize) -> std::ops::Range<usize> {
    taken.sort_unstable();
    let (mut best, mut at) = (0..0, 0);
    for (from, to) in taken.into_iter().chain([(total, total)]) {
        if from.saturating_sub(at) > best.len() {
            best = at..from;
        }
        at = at.max(to.next_multiple_of(ALIGN));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_gap() {
        assert_eq!(widest_gap(vec![], 640), 0..640);
        assert_eq!(widest_gap(vec![(512, 640), (0, 100), (64, 190)], 640), 192..512);
        assert_eq!(widest_gap(vec![(0, 640)], 640), 0..0);
    }

    fn life(bytes: usize, first: usize, last: usize) -> Lifetime {
        Lifetime { bytes, first, last, becomes: None }
    }

    #[test]
    fn lifetimes_that_meet_lie_apart() {
        let (spots, total) = place(&[life(100, 0, 1), life(100, 1, 2), life(60, 2, 3), life(200, 5, 5)], &[]);
        assert_eq!(spots, [0, 128, 0, 0].map(Spot::Arena));
        assert_eq!(total, 256);
        assert_eq!(place(&[], &[]), (vec![], 0));
    }

    #[test]
    fn outputs_lend_their_memory() {
        let rooms = [Room { bytes: 128, until: 3 }, Room { bytes: 64, until: 1 }];
        let all = [life(128, 0, 2), life(64, 0, 0), life(128, 1, 3), life(128, 2, 3)];
        let (spots, total) = place(&all, &rooms);
        assert_eq!(spots[0], Spot::Room { room: 0, offset: 0 });
        assert_eq!(spots[1], Spot::Room { room: 1, offset: 0 });
        assert_eq!(total, 256, "the others live when the outputs do: {spots:?}");
        // What becomes the output lies where the output begins.
        let heir = Lifetime { becomes: Some(0), ..life(64, 1, 3) };
        let (spots, total) = place(&[life(128, 0, 1), heir], &rooms);
        assert_eq!((spots[1], total), (Spot::Room { room: 0, offset: 0 }, 128));
    }

    /// Nothing that lives at once overlaps, and the arena is no larger than everything side by side and no
    /// smaller than what must be.
    #[test]
    fn random_lifetimes() {
        let mut state = 5u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let mut perfect = 0;
        for _ in 0..300 {
            let rooms: Vec<Room> =
                (0..random(4)).map(|_| Room { bytes: 1 + random(900), until: random(24) }).collect();
            let mut all: Vec<Lifetime> = (0..random(25))
                .map(|_| {
                    let first = random(20);
                    life(1 + random(1000), first, first + random(5))
                })
                .collect();
            for (number, room) in rooms.iter().enumerate() {
                if random(2) == 0 && room.until > 0 {
                    let first = random(room.until);
                    let heir = Lifetime { becomes: Some(number), ..life(room.bytes, first, room.until) };
                    all.push(heir);
                }
            }
            let (spots, total) = place(&all, &rooms);
            let sum: usize = all.iter().map(|l| l.bytes.next_multiple_of(ALIGN)).sum();
            assert!(least(&all, &rooms) <= total && total <= sum);
            perfect += usize::from(total == least(&all, &rooms));
            let begin = |spot: Spot| match spot {
                Spot::Arena(at) => (usize::MAX, at),
                Spot::Room { room, offset } => (room, offset),
            };
            for (i, a) in all.iter().enumerate() {
                let (space, at) = begin(spots[i]);
                assert!(at.is_multiple_of(ALIGN));
                match spots[i] {
                    Spot::Arena(_) => assert!(at + a.bytes <= total),
                    Spot::Room { room, .. } => {
                        assert!(at + a.bytes <= rooms[room].bytes);
                        assert!(a.last < rooms[room].until || a.becomes == Some(room) && at == 0);
                    }
                }
                for (b, &other) in all[..i].iter().zip(&spots) {
                    let meet = a.first <= b.last && b.first <= a.last;
                    let (there, from) = begin(other);
                    let apart = space != there || at + a.bytes <= from || from + b.bytes <= at;
                    assert!(!meet || apart, "{a:?} at {:?} and {b:?} at {other:?}", spots[i]);
                }
            }
        }
        assert!(perfect > 150, "{perfect} of 300 are as small as can be");
    }
}
