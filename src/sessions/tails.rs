//! Anonymous rewrites: a client without ids that edits the message it sent last.
//!
//! Such a lane is found by the digest of what stands before its last one or two items. When that is only what all
//! conversations of the client share (tools, system), the text has to be the same at one end too: aider takes its
//! reminder off again, others a date.

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::prompt::{ItemKind, Layout, Prompt};

use super::lane::Lane;

/// Lanes kept for one digest.
const WIDTH: usize = 8;

/// The digests under which a lane is filed.
pub(super) type Tails = SmallVec<[u64; 2]>;

/// Anonymous lanes by scope and the digest before their tail.
#[derive(Debug, Default)]
pub(super) struct TailIndex(HashMap<u64, SmallVec<[u32; 2]>>);

impl TailIndex {
    /// Files a lane, the newest last.
    pub fn insert(&mut self, digest: u64, lane: u32) {
        let lanes = self.0.entry(digest).or_default();
        lanes.retain(|&mut other| other != lane);
        if lanes.len() == WIDTH {
            lanes.remove(0);
        }
        lanes.push(lane);
    }

    pub fn remove(&mut self, digest: u64, lane: u32) {
        if let Some(lanes) = self.0.get_mut(&digest) {
            lanes.retain(|&mut other| other != lane);
            if lanes.is_empty() {
                self.0.remove(&digest);
            }
        }
    }

    /// Lanes filed under a digest, the newest first.
    pub fn get(&self, digest: u64) -> impl Iterator<Item = u32> + '_ {
        self.0.get(&digest).into_iter().flatten().rev().copied()
    }
}

/// The digests before the last one and two items of a lane's prompt.
pub(super) fn of_lane(layout: &Layout, scope: u64) -> Tails {
    let count = layout.items.len();
    (1..=2)
        .filter_map(|back| layout.digest_of(count.checked_sub(back)?))
        .map(|digest| digest ^ scope)
        .collect()
}

/// The digests under which the lane a request rewrites would be filed: the lane's last item stands before the
/// request's last answer.
pub(super) fn of_request(layout: &Layout, scope: u64) -> Tails {
    let answer = layout.items.iter().rposition(|item| item.kind == ItemKind::Assistant);
    let Some(mut answer) = answer else { return Tails::new() };
    // One answer may be several items (Responses).
    while answer > 0 && layout.items[answer - 1].kind == ItemKind::Assistant {
        answer -= 1;
    }
    (0..=2)
        .filter_map(|back| layout.digest_of(answer.checked_sub(back)?))
        .map(|digest| digest ^ scope)
        .collect()
}

/// Bytes kept of each end of a text.
const EDGE: usize = 64;

/// Both ends of the text of an item, without its header and end mark.
pub(super) fn edges(item: &[u8]) -> Box<[u8]> {
    let start = memchr::memchr(b'\n', item).map_or(0, |at| at + 1);
    let text = item[start..].strip_suffix(&[0xFF]).unwrap_or(&item[start..]);
    if text.len() <= 2 * EDGE {
        return text.into();
    }
    [&text[..EDGE], &text[text.len() - EDGE..]].concat().into()
}

/// Whether the message before the request's first new answer looks like the lane's last one, edited.
pub(super) fn affine(lane: &Lane, prompt: &Prompt<'_>) -> bool {
    let Some(live) = lane.live.as_deref() else { return false };
    let Some(answer) = prompt.layout().items.iter().position(|item| item.kind == ItemKind::Assistant) else {
        return false;
    };
    let Some(item) = answer.checked_sub(1).and_then(|at| prompt.item(at)) else { return false };
    let (now, before) = (edges(item), &live.edges);
    let need = now.len().min(before.len()).min(EDGE);
    let ends = |text: &[u8]| text[text.len() - need..].to_vec();
    need > 0 && (now[..need] == before[..need] || ends(&now) == ends(before))
}
