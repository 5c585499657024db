//! What a later turn need not read again: the raw prefix of its messages, checked by one digest.

use std::hash::Hasher as _;
use std::sync::Arc;

use smallvec::SmallVec;
use twox_hash::xxhash3_64::Hasher as Xxh3;

use super::chain::ChainState;
use super::layout::Layout;

/// How many items from its end a second mark is kept: clients move cache breakpoints over their last
/// messages and rewrite the newest, so the end itself may change.
const BACK: usize = 4;
/// Below this a prefix is not worth the check.
const MIN_RAW: usize = 2048;

/// A place between two messages of the body read last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Bytes from the first after the array's `[` to the end of a message.
    pub raw: usize,
    /// Their digest.
    pub digest: u64,
    /// Items of the prompt up to here.
    pub items: usize,
    /// Where the chain stands.
    pub state: ChainState,
}

/// What is kept of a prompt to read its extension quickly.
#[derive(Debug, Clone)]
pub struct Known {
    /// The prompt.
    pub layout: Arc<Layout>,
    /// The digest of what stands before the messages in template order: model, tools, system.
    pub head: u64,
    /// Places to go on from, the nearer to the start first.
    pub marks: [Option<Mark>; 2],
}

/// Finds what is known of a body.
pub trait Prefixes {
    /// The most likely owner of a body whose messages begin with `array` (all after the `[`, to the end of the body).
    fn find(&self, array: &[u8]) -> Option<Known>;
}

/// Nothing is known: every body is read whole.
impl Prefixes for () {
    fn find(&self, _: &[u8]) -> Option<Known> {
        None
    }
}

/// How far a body is known.
pub(crate) struct Resumed {
    pub known: Known,
    /// The furthest mark that holds.
    pub mark: Mark,
    /// The hash of everything up to it, to go on with.
    hash: Xxh3,
}

impl Resumed {
    /// The furthest mark of `known` that `array` still holds.
    pub fn new(known: Known, array: &[u8]) -> Option<Self> {
        let (mut hash, mut at, mut best) = (Xxh3::new(), 0, None);
        for mark in known.marks.iter().flatten() {
            let Some(piece) = array.get(at..mark.raw) else { break };
            hash.write(piece);
            at = mark.raw;
            if hash.finish() != mark.digest {
                break;
            }
            best = Some((*mark, hash.clone()));
        }
        let (mark, hash) = best?;
        Some(Self { known: known.clone(), mark, hash })
    }
}

/// The end of a message that was read: its raw end, items up to it, the chain there.
pub(crate) type End = (usize, usize, ChainState);

/// Marks for the prompt just read; `ends` are those of the messages that were read, behind `resumed`.
pub(crate) fn marks(array: &[u8], resumed: Option<Resumed>, ends: &[End]) -> [Option<Mark>; 2] {
    let (mut hash, mut at, held) = match resumed {
        None => (Xxh3::new(), 0, [None; 2]),
        Some(r) => {
            let held = r.known.marks.map(|mark| mark.filter(|mark| mark.raw <= r.mark.raw));
            (r.hash, r.mark.raw, held)
        }
    };
    let held: SmallVec<[Mark; 2]> = held.into_iter().flatten().collect();
    let Some(&last) = ends.last() else {
        // Nothing new: the same marks again.
        return [held.first().filter(|_| held.len() > 1).copied(), held.last().copied()];
    };
    if last.0 < MIN_RAW {
        return [None; 2];
    }
    let mut mark = |&(raw, items, state): &End| {
        hash.write(array.get(at..raw)?);
        at = raw;
        Some(Mark { raw, digest: hash.finish(), items, state })
    };
    // The last one far enough back; after a short extension, whatever there is.
    let far = |items: usize| items + BACK <= last.1;
    let early = match ends.iter().rev().find(|end| far(end.1)) {
        Some(end) => mark(end),
        None => held.iter().rev().find(|mark| far(mark.items)).or(held.first()).copied(),
    };
    let early = early.or_else(|| ends.first().filter(|end| end.1 < last.1).and_then(&mut mark));
    [early, mark(&last)]
}
