//! What a request on a known lane costs: turns, shared items, tokens.

use crate::prompt::{BLOCK_BYTES, ItemKind, Layout};

use super::class::Class;
use super::estimate::{Lies, Size};
use super::lane::{Lane, size_of};
use super::line::Line;
use super::lineage::Match;
use super::request::Request;
use super::turn::{How, Turn};

/// A second request shows that a small or tool-less lane is a conversation; a declared class stays.
pub(super) fn promote(lane: &mut Lane, how: How, asked: &Request<'_>) {
    if let Some(class) = asked.declared.class {
        (lane.class, lane.declared, lane.ephemeral) = (class, true, false);
        return;
    }
    let longer = asked.prompt.layout().items.len() > lane.print.items as usize;
    let goes_on = match how {
        How::Extend | How::CallId | How::PrevId => true,
        How::TailRewrite => longer,
        How::New | How::Retry | How::Rewrite => false,
    };
    if !goes_on || lane.declared {
        return;
    }
    lane.ephemeral = false;
    if matches!(lane.class, Class::Ephemeral | Class::Aux) {
        lane.class = if asked.declared.subagent { Class::Subagent } else { Class::Main };
    }
}

/// Fills in what the lane says about the turn.
pub(super) fn measure(
    lane: &Lane,
    line: &Line,
    layout: &Layout,
    found: Match,
    asked: &Request<'_>,
    turn: &mut Turn,
) {
    let lies = lies(lane, line, layout, asked);
    let size = turn.ticket.size;
    turn.session = lane.session.clone();
    turn.lane = lane.number;
    turn.how = found.how;
    turn.class = lane.class;
    turn.one_shot = lane.class.is_side() || lane.ephemeral;
    // The committed prompt once more is the turn it was, not the next one.
    turn.t = u64::from(lane.turns) - u64::from(lies == Lies::Same && lane.turns > 0);
    turn.reuse_items = found.common.min(layout.items.len());
    turn.append_items = layout.items.len() - turn.reuse_items;
    turn.append_bytes = match (found.how, asked.prompt.bare) {
        (How::Retry, _) => 0,
        (_, true) => size.bytes.saturating_sub(lane.print.bytes.into()),
        _ => size.bytes - size_of(layout, turn.reuse_items).bytes,
    };
    turn.shared_blocks = shared_blocks(lane, layout, lies);
    let held;
    (turn.input_len, held) = match found.how {
        How::PrevId => lane.estimate.delta(delta(layout, asked), line),
        _ => lane.estimate.of(size, lies, line),
    };
    turn.append_len = turn.input_len.saturating_sub(held);
    turn.ticket.lies = lies;
    turn.ticket.against = lane.print.digest;
    if found.how == How::PrevId {
        // Between the known prompt and the delta stands an answer nobody here has seen: no hash is better than a
        // wrong one.
        let whole = lane.live.as_deref().and_then(|live| live.whole.as_ref());
        // Tools and instructions are not carried over: with others the prompt begins anew.
        let same = whole.filter(|(head, _)| *head == asked.prompt.known.head);
        turn.chain = same.map_or_else(|| [].into(), |(_, chain)| chain.clone());
    }
}

/// How the prompt lies against the last commit.
fn lies(lane: &Lane, line: &Line, layout: &Layout, asked: &Request<'_>) -> Lies {
    let print = lane.print;
    if !lane.committed {
        return Lies::Apart;
    }
    if print.digest == layout.digest() {
        return Lies::Same;
    }
    let whole = Size { bytes: layout.bytes(), media: layout.media() };
    if asked.prompt.bare {
        let before = Size { bytes: print.bytes.into(), media: 0 };
        if asked.prompt.starts_with(1, before.bytes, print.digest) {
            let (echo, rest) = lane.estimate.split(whole.beyond(before), line);
            return Lies::Beyond { echo, rest };
        }
    } else if layout.digest_of(print.items as usize) == Some(print.digest) {
        let items = print.items as usize;
        let said = layout.items[items..].iter().take_while(|item| item.kind == ItemKind::Assistant);
        let answered = size_of(layout, items + said.count());
        return Lies::Beyond { echo: answered.beyond(size_of(layout, items)), rest: whole.beyond(answered) };
    }
    let shared = lane.committed_layout().map_or(0, |before| before.common_blocks(layout));
    if shared == 0 {
        return Lies::Apart;
    }
    Lies::Shares { blocks: shared as u64 }
}

fn shared_blocks(lane: &Lane, layout: &Layout, lies: Lies) -> usize {
    match lies {
        Lies::Apart => 0,
        Lies::Same => layout.chain.len(),
        Lies::Beyond { .. } => lane.print.bytes as usize / BLOCK_BYTES,
        Lies::Shares { blocks } => blocks as usize,
    }
}

/// What a request carries when the rest of the prompt is on the worker.
fn delta(layout: &Layout, asked: &Request<'_>) -> Size {
    let all = Size { bytes: layout.bytes(), media: layout.media() };
    let media = asked.prompt.layout().media();
    Size { bytes: asked.prompt.text.len() as u64, media: media.min(all.media) }
}
