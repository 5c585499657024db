//! Placing a request: on the lane it continues, or on a new one.

use std::sync::Arc;

use crate::core::types::Millis;
use crate::prompt::{Known, Layout};

use super::class::Class;
use super::estimate::{Estimate, Lies};
use super::hints::Samples;
use super::identity::Strength;
use super::lane::{Lane, Live, NIL, Print};
use super::lineage::{Match, Query, common, head_digest};
use super::measure::{measure, promote};
use super::registry::Registry;
use super::request::{Request, session};
use super::tails;
use super::turn::{How, Turn};

/// A new lane with fewer canonical bytes is not worth placing before something extends it.
pub const EPHEMERAL_BYTES: u64 = 4096;

impl Registry {
    /// Finds or makes the lane of a request.
    pub(super) fn find_or_open(&mut self, asked: &Request<'_>, now: Millis) -> Turn {
        let groups = asked.groups();
        let owner = asked.owner(self);
        let query = Query {
            scope: asked.scope,
            strength: asked.identity.strength,
            groups: &groups,
            prompt: &asked.prompt,
            side: asked.declared.class.filter(|class| class.is_side()),
            subagent: asked.declared.class.map_or(asked.declared.subagent, |class| class == Class::Subagent),
            owner,
        };
        let found = query.find(&self.store, &self.minted, &self.tails);
        let mut turn = match found.filter(|found| self.fresh(found.at, now)) {
            Some(found) => self.join(asked, found, now),
            None => self.open(asked, &groups[0], now),
        };
        turn.stateful = asked.stateful(turn.how == How::PrevId);
        turn
    }

    /// Whether a lane is within its time; if not it is forgotten here and now.
    fn fresh(&mut self, at: u32, now: Millis) -> bool {
        let expired = |used: Millis| now.saturating_sub(used) >= self.limits.ttl;
        let fresh = self.store.get(at).is_some_and(|lane| !expired(lane.used));
        if !fresh {
            self.forget(at);
        }
        fresh
    }

    /// A request that continues a lane.
    fn join(&mut self, asked: &Request<'_>, found: Match, now: Millis) -> Turn {
        let layout = self.layout_for(asked, found);
        self.store.touch(found.at, now);
        let mut turn = asked.turn(Some(self.store.handle(found.at)), &layout);
        let line = self.models.get(asked.scope).line;
        if let Some(lane) = self.store.get_mut(found.at) {
            promote(lane, found.how, asked);
            measure(lane, &line, &layout, found, asked, &mut turn);
        }
        turn.ticket.layout = Some(layout.clone());
        self.see(found.at, asked, layout, &mut turn);
        turn
    }

    /// The prompt as the engine will see it: what the body carries, behind what a delta leaves out.
    fn layout_for(&self, asked: &Request<'_>, found: Match) -> Arc<Layout> {
        let own = &asked.prompt.known.layout;
        if found.how != How::PrevId {
            return own.clone();
        }
        let before = self.store.get(found.at).and_then(Lane::committed_layout);
        before.map_or_else(|| own.clone(), |before| Arc::new(asked.prompt.onto(before)))
    }

    /// A request that starts a lane.
    fn open(&mut self, asked: &Request<'_>, group: &str, now: Millis) -> Turn {
        let layout = asked.prompt.known.layout.clone();
        self.make_room(group);
        let number = 1 + self.store.lanes(group).map(|(_, lane)| lane.number).max().unwrap_or(0);
        let (class, ephemeral) = self.classify(asked, group, &layout);
        let parent =
            asked.declared.parent.as_deref().map(str::to_owned).or_else(|| self.fork_of(group, &layout));
        let model = self.models.get(asked.scope);
        let lane = Lane {
            session: session(group, number),
            print: Print::of(&layout),
            head: head_digest(&layout),
            used: now,
            live: None,
            estimate: Estimate::starting(model.whole),
            turns: 0,
            minted: 0,
            next_in_group: NIL,
            older: NIL,
            newer: NIL,
            number,
            generation: 0,
            group_len: u16::try_from(group.len()).unwrap_or(u16::MAX),
            class,
            declared: asked.declared.class.is_some(),
            tools: layout.has_tools(),
            ephemeral,
            committed: false,
        };
        let at = self.store.insert(lane);
        let mut turn = asked.turn(Some(self.store.handle(at)), &layout);
        turn.parent = parent;
        if let Some(lane) = self.store.get(at) {
            turn.session = lane.session.clone();
            turn.lane = number;
            turn.class = class;
            turn.one_shot = class.is_side() || ephemeral;
            (turn.input_len, _) = lane.estimate.of(turn.ticket.size, Lies::Apart, &model.line);
            turn.append_len = turn.input_len;
            turn.ticket.against = lane.print.digest;
        }
        turn.ticket.layout = Some(layout.clone());
        self.see(at, asked, layout, &mut turn);
        turn
    }

    /// Drops the lane of a full group that was used longest ago.
    fn make_room(&mut self, group: &str) {
        if self.store.lanes(group).count() < self.limits.lanes.max(1) {
            return;
        }
        let oldest = self.store.lanes(group).min_by_key(|(_, lane)| lane.used).map(|(at, _)| at);
        if let Some(at) = oldest {
            self.forget(at);
        }
    }

    /// The class of a new lane, and whether it is too small to place yet.
    fn classify(&self, asked: &Request<'_>, group: &str, layout: &Layout) -> (Class, bool) {
        if let Some(class) = asked.declared.class {
            return (class, false);
        }
        let small = layout.bytes() < EPHEMERAL_BYTES;
        let keyed = asked.identity.strength != Strength::None;
        let beside = keyed && !layout.has_tools() && self.store.lanes(group).any(|(_, lane)| lane.tools);
        match (asked.declared.subagent, beside) {
            // Its mark says what it is; without tools it most likely asks once.
            (true, _) => (Class::Subagent, small || beside),
            (_, true) => (Class::Aux, small),
            _ if small => (Class::Ephemeral, true),
            _ => (Class::Main, false),
        }
    }

    /// The lane of the group that a new one shares most with; else the group's first conversation.
    fn fork_of(&self, group: &str, layout: &Layout) -> Option<String> {
        let real = self.store.lanes(group).filter(|(_, lane)| !lane.class.is_side() && !lane.ephemeral);
        let (_, _, lane) = real
            .map(|(_, lane)| (common(lane, layout), std::cmp::Reverse(lane.number), lane))
            .max_by_key(|&(common, number, _)| (common, number))?;
        Some(lane.session.public().to_owned())
    }

    /// Keeps what was seen, so that the next request is recognised and read quickly.
    fn see(&mut self, at: u32, asked: &Request<'_>, layout: Arc<Layout>, turn: &mut Turn) {
        let old = self.unfile(at);
        let same = turn.how != How::PrevId && Arc::ptr_eq(&layout, &asked.prompt.known.layout);
        let anonymous = asked.identity.strength == Strength::None;
        if let Some(lane) = self.store.get_mut(at).filter(|lane| !lane.committed) {
            lane.print = Print::of(&layout);
        }
        let last = layout.items.len().checked_sub(1).and_then(|last| asked.prompt.item(last));
        let filed = if anonymous { tails::of_lane(&layout, asked.scope) } else { tails::Tails::new() };
        for &digest in &filed {
            self.tails.insert(digest, at);
        }
        let (committed, before, whole) =
            old.map_or((None, None, None), |old| (old.committed, old.parent, old.whole));
        let parent = turn.parent.as_deref().map(Arc::from).or(before);
        turn.parent = parent.as_deref().map(str::to_owned);
        let whole = if same { Some((asked.prompt.known.head, layout.chain.clone())) } else { whole };
        let known = Known {
            layout,
            head: asked.prompt.known.head,
            // A delta's raw bytes don't begin the next body.
            marks: if same { asked.prompt.known.marks } else { [None; 2] },
        };
        let live = Live {
            seen: known,
            whole,
            committed,
            parent,
            hints: smallvec::SmallVec::new(),
            tails: filed,
            edges: last.filter(|_| anonymous).map(tails::edges).unwrap_or_default(),
        };
        self.store.set_live(at, Some(Box::new(live)));
    }

    /// Files the lane under the samples of its body.
    pub(super) fn hint(&mut self, at: u32, known: &Known, samples: &Samples) {
        let Some(live) = self.store.get_mut(at).and_then(|lane| lane.live.as_deref_mut()) else { return };
        for mark in known.marks.iter().flatten() {
            if let Some(digest) = samples.at(mark.raw).filter(|digest| !live.hints.contains(digest)) {
                live.hints.push(digest);
                self.hints.set(digest, at);
            }
        }
    }

    /// Takes a lane's live part out of the indexes and returns it, leaving the lane marked live.
    fn unfile(&mut self, at: u32) -> Option<Live> {
        let live = self.store.get_mut(at)?.live.as_deref_mut()?;
        let hints = std::mem::take(&mut live.hints);
        let filed = std::mem::take(&mut live.tails);
        let old = Live {
            seen: live.seen.clone(),
            whole: live.whole.take(),
            committed: live.committed.take(),
            parent: live.parent.take(),
            hints: smallvec::SmallVec::new(),
            tails: tails::Tails::new(),
            edges: Box::default(),
        };
        for digest in hints {
            self.hints.unset(digest, at);
        }
        for digest in filed {
            self.tails.remove(digest, at);
        }
        Some(old)
    }

    /// Drops what a lane in use needs only.
    pub(super) fn rest(&mut self, at: u32) {
        self.unfile(at);
        self.store.set_live(at, None);
    }

    /// Drops a lane.
    pub(super) fn forget(&mut self, at: u32) {
        self.unfile(at);
        self.store.remove(at);
    }
}
