//! The book of sessions: where a session's actor is, or the small record that stays of one at rest. Sharded, and
//! locked only to look up: no decision is made under a lock.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ractor::{ActorId, ActorRef};
use tokio::time::Instant;

use super::session::SessionMsg;
use crate::core::route::SessionState;
use crate::core::types::{SessionId, Tokens, WorkerId};

const SHARDS: usize = 64;
/// Resting records looked at to find an old one to forget when the book is full.
const SAMPLE: usize = 16;

/// A live session's actor. `waiting` counts turns sent to it and not yet begun, so that it does not stop under
/// a turn that is already in its mailbox.
#[derive(Debug, Clone)]
pub struct Live {
    /// The actor.
    pub actor: ActorRef<SessionMsg>,
    /// Turns in its mailbox.
    pub waiting: Arc<AtomicU32>,
}

/// What stays of a session at rest.
#[derive(Debug, Clone)]
pub struct Record {
    /// Pin and rejects.
    pub state: SessionState,
    /// The size learned for its answers, in tokens.
    pub output: Tokens,
    /// The P it last had to do with.
    pub last_p: Option<WorkerId>,
    /// Last turn.
    pub last_used: Instant,
}

#[derive(Debug)]
enum Entry {
    Live(Live),
    Resting(Record),
}

/// See the module.
#[derive(Debug)]
pub struct Book {
    shards: Vec<Mutex<HashMap<SessionId, Entry>>>,
    hasher: std::collections::hash_map::RandomState,
    per_shard: usize,
}

impl Book {
    /// A book for `max` records.
    pub fn new(max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: std::collections::hash_map::RandomState::new(),
            per_shard: max.div_ceil(SHARDS).max(1),
        }
    }

    fn shard(&self, session: &SessionId) -> MutexGuard<'_, HashMap<SessionId, Entry>> {
        let shard = self.hasher.hash_one(session) as usize % SHARDS;
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a turn to the session's actor, which `spawn` starts (from its record, if one rests) when there is
    /// none or it died. `None`: the turn could not be sent and is dropped.
    pub(super) fn send(
        &self,
        session: &SessionId,
        message: SessionMsg,
        spawn: impl FnOnce(Option<Record>) -> Option<Live>,
    ) -> Option<ActorRef<SessionMsg>> {
        let mut shard = self.shard(session);
        let mut message = message;
        if let Some(Entry::Live(live)) = shard.get(session) {
            match live.deliver(message) {
                Ok(()) => return Some(live.actor.clone()),
                Err(back) => message = *back,
            }
        }
        let record = match shard.remove(session) {
            Some(Entry::Resting(record)) => Some(record),
            _ => None,
        };
        if shard.len() >= self.per_shard {
            forget_one(&mut shard);
        }
        let live = spawn(record)?;
        let sent = live.deliver(message).is_ok().then(|| live.actor.clone());
        shard.insert(session.clone(), Entry::Live(live));
        sent
    }

    /// Replaces a session's actor by a record, unless a turn is on its way to it or the book knows another.
    pub(super) fn rest(&self, session: &SessionId, live: &Live, record: Record) -> bool {
        let mut shard = self.shard(session);
        match shard.get(session) {
            Some(Entry::Live(known)) if known.actor.get_id() == live.actor.get_id() => {
                if live.waiting.load(Relaxed) > 0 {
                    return false;
                }
                shard.insert(session.clone(), Entry::Resting(record));
                true
            }
            _ => true,
        }
    }

    /// Forgets a session whose actor ended without leaving a record, unless another one has taken over.
    pub(super) fn forget(&self, session: &SessionId, actor: ActorId) {
        let mut shard = self.shard(session);
        if matches!(shard.get(session), Some(Entry::Live(live)) if live.actor.get_id() == actor) {
            shard.remove(session);
        }
    }

    /// Forgets records whose last turn is before `horizon`.
    pub fn sweep(&self, horizon: Instant) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|_, entry| match entry {
                Entry::Live(_) => true,
                Entry::Resting(record) => record.last_used >= horizon,
            });
        }
    }

    /// `(live, resting)` sessions.
    pub fn counts(&self) -> (usize, usize) {
        self.shards.iter().fold((0, 0), |(live, resting), shard| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let l = shard.values().filter(|e| matches!(e, Entry::Live(_))).count();
            (live + l, resting + shard.len() - l)
        })
    }

    /// Up to `limit` live actors with their sessions.
    pub fn live(&self, limit: usize) -> Vec<(SessionId, ActorRef<SessionMsg>)> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            found.extend(shard.iter().filter_map(|(id, entry)| match entry {
                Entry::Live(live) => Some((id.clone(), live.actor.clone())),
                Entry::Resting(_) => None,
            }));
            if found.len() >= limit {
                found.truncate(limit);
                break;
            }
        }
        found
    }
}

impl Live {
    /// Puts a turn into the mailbox; gives it back when the actor is gone.
    pub(super) fn deliver(&self, message: SessionMsg) -> Result<(), Box<SessionMsg>> {
        self.waiting.fetch_add(1, Relaxed);
        self.actor.cast(message).map_err(|error| {
            self.waiting.fetch_sub(1, Relaxed);
            match error {
                ractor::MessagingErr::SendErr(message) => Box::new(message),
                _ => Box::new(SessionMsg::Idle),
            }
        })
    }
}

/// Makes room in a full shard: the oldest of a few resting records. Live sessions are bounded by their turns.
fn forget_one(shard: &mut HashMap<SessionId, Entry>) {
    let resting = shard.iter().filter_map(|(id, entry)| match entry {
        Entry::Resting(record) => Some((record.last_used, id)),
        Entry::Live(_) => None,
    });
    if let Some(id) = resting.take(SAMPLE).min().map(|(_, id)| id.clone()) {
        shard.remove(&id);
    }
}
