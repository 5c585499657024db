//! What a later turn need not read again: the raw prefix of its messages, checked by one digest.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

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
    fn find(&self, array: &[u8]) -> Option<&Known>;
}

/// Nothing is known: every body is read whole.
impl Prefixes for () {
    fn find(&self, _: &[u8]) -> Option<&Known> {
        None
    }
}

/// The furthest mark of `known` that `array` still holds.
pub(crate) fn furthest(known: &Known, array: &[u8]) -> Option<Mark> {
    let (mut hash, mut at, mut best) = (Xxh3::new(), 0, None);
    for mark in known.marks.iter().flatten() {
        let Some(piece) = array.get(at..mark.raw) else { break };
        hash.update(piece);
        at = mark.raw;
        if hash.digest() != mark.digest {
            break;
        }
        best = Some(*mark);
    }
    best
}

/// Marks for the prompt just read; `ends` are the raw ends of messages, with their item counts and states.
pub(crate) fn marks(array: &[u8], ends: &[(usize, usize, ChainState)]) -> [Option<Mark>; 2] {
    let Some((&last, before)) = ends.split_last().filter(|(last, _)| last.0 >= MIN_RAW) else {
        return [None; 2];
    };
    // The last one far enough back; after a short extension, whatever there is.
    let far = before.iter().rev().find(|end| end.1 + BACK <= last.1);
    let early = far.or(before.first()).copied();
    let mut hash = Xxh3::new();
    let mut at = 0;
    let mut mark = |(raw, items, state): (usize, usize, ChainState)| {
        hash.update(array.get(at..raw)?);
        at = raw;
        Some(Mark { raw, digest: hash.digest(), items, state })
    };
    let early = early.and_then(&mut mark);
    [early, mark(last)]
}
