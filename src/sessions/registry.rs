//! The registry: places requests on lanes, and learns from their answers.

use xxhash_rust::xxh3::xxh3_64;

use crate::core::types::Millis;
use crate::prompt::{BadBody, call_id};

use super::estimate::{Lies, Usage};
use super::hints::Hints;
use super::lane::Print;
use super::line::Models;
use super::lineage::{CALL, RESPONSE, minted_key};
use super::minted::Minted;
use super::request::Request;
use super::store::Store;
use super::tails::TailIndex;
use super::turn::{Answer, Incoming, Turn};

/// What the registry may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Lanes in a group; the one used longest ago goes first.
    pub lanes: usize,
    /// Lanes in all.
    pub records: usize,
    /// Lanes that keep their prompt's layout in memory.
    pub live: usize,
    /// An unused lane drops its layout after this.
    pub rest: Millis,
    /// An unused lane is forgotten after this.
    pub ttl: Millis,
}

impl Default for Limits {
    fn default() -> Self {
        Self { lanes: 64, records: 1_000_000, live: 4096, rest: 10 * 60 * 1000, ttl: 4 * 60 * 60 * 1000 }
    }
}

/// Whose turn is this: groups, lanes, and the indexes that find them. Plain data; the caller shards and locks it.
#[derive(Debug)]
pub struct Registry {
    pub(super) limits: Limits,
    pub(super) store: Store,
    pub(super) minted: Minted,
    pub(super) hints: Hints,
    pub(super) tails: TailIndex,
    pub(super) models: Models,
}

impl Registry {
    /// An empty registry.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            store: Store::new(),
            minted: Minted::new(limits.records),
            hints: Hints::default(),
            tails: TailIndex::default(),
            models: Models::default(),
        }
    }

    /// Lanes known.
    pub fn len(&self) -> usize {
        self.store.len()
    }

    /// Whether no lane is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lanes that keep their layout.
    pub fn live(&self) -> usize {
        self.store.live()
    }

    /// Reads a request and places it: [`Request::read`] and [`place`](Self::place) in one.
    ///
    /// # Errors
    /// [`BadBody`] when the body cannot be routed: the client gets 400.
    pub fn begin(&mut self, req: &Incoming<'_>, now: Millis) -> Result<Turn, BadBody> {
        let request = Request::read(req, self)?;
        Ok(self.place(&request, now))
    }

    /// Places a request on a lane. The lane's turns change only when [`commit`](Self::commit) reports success.
    pub fn place(&mut self, request: &Request<'_>, now: Millis) -> Turn {
        self.sweep(now);
        if request.probe {
            return request.probe(self.models.get(request.scope));
        }
        let turn = self.find_or_open(request, now);
        if let (Some(lane), Some(samples)) = (turn.ticket.lane, &request.samples) {
            self.hint(lane.at, &request.prompt.known, samples);
        }
        turn
    }

    /// Whether a lane here owns the state the request refers to.
    pub fn owns(&self, request: &Request<'_>) -> bool {
        request.owner(self).is_some()
    }

    /// Learns from the answer to a turn.
    pub fn commit(&mut self, turn: &Turn, answer: &Answer<'_>, now: Millis) {
        let ticket = &turn.ticket;
        let Some(at) = ticket.lane.and_then(|lane| self.store.resolve(lane)) else { return };
        self.store.touch(at, now);
        let (true, Some(layout)) = (answer.ok, &ticket.layout) else { return };
        let usage = Usage {
            prompt: answer.prompt_tokens,
            completion: answer.completion_tokens,
            cached: answer.cached_tokens,
        };
        let Some(lane) = self.store.get_mut(at) else { return };
        let before = lane.print;
        let again = lane.committed && before.digest == layout.digest();
        lane.turns += u32::from(!again);
        // Overlapping turns: what this one was measured against is no longer the last commit.
        let lies = if before.digest == ticket.against { ticket.lies } else { Lies::Apart };
        let mut model = self.models.get(ticket.scope);
        lane.estimate.learn(ticket.size, lies, usage, &mut model);
        if usage.prompt.is_some() {
            self.models.set(ticket.scope, model);
        }
        lane.print = Print::of(layout);
        lane.committed = true;
        if let Some(live) = lane.live.as_deref_mut() {
            live.committed = Some(layout.clone());
        }
        self.mint(at, ticket.scope, answer);
    }

    /// Forgets what is past its time or over a bound; a little on every call.
    pub fn sweep(&mut self, now: Millis) {
        for _ in 0..4 {
            let Some((at, lane)) = self.store.oldest() else { break };
            if now.saturating_sub(lane.used) < self.limits.ttl && self.len() <= self.limits.records {
                break;
            }
            self.forget(at);
        }
        for _ in 0..4 {
            let Some((at, lane)) = self.store.oldest_live() else { break };
            if now.saturating_sub(lane.used) < self.limits.rest && self.live() <= self.limits.live {
                break;
            }
            self.rest(at);
        }
    }

    /// Indexes the ids an answer created.
    fn mint(&mut self, at: u32, scope: u64, answer: &Answer<'_>) {
        let handle = self.store.handle(at);
        let Some(lane) = self.store.get_mut(at) else { return };
        let commit = lane.turns;
        let calls = answer.calls.iter().filter_map(|id| call_id(id.as_bytes()));
        let calls: Vec<u64> = calls.map(|id| minted_key(scope, CALL, id)).collect();
        if !calls.is_empty() {
            lane.minted = commit;
        }
        let responses = answer.responses.iter().map(|id| minted_key(scope, RESPONSE, xxh3_64(id.as_bytes())));
        for id in calls.into_iter().chain(responses) {
            self.minted.insert(id, handle, commit, |lane| self.store.resolve(lane).is_some());
        }
    }
}
