//! Admission for engines that do not decide it themselves: the same ledger that a builtin worker has, kept beside an
//! engine that knows nothing of it. In the gateway (`admission = "local"`, behind the transport trait) or in a
//! `kvc-router node` (`admission = "node"`).
//!
//! - [`books`]: the ledger, the turns, the engine's slots; [`scale`]: its tokens; [`trust`]: what it says of its cache.
//! - [`events`]: what engines publish about their cache; [`names`]: its blocks by the router's names.
//! - [`hold`]: a running turn; it ends in the books exactly once.
//! - [`handback`]: D→P sync by the engines' own means.
//! - [`feed`]: numbered changes for whoever mirrors the books. [`local`]: all keepers of a gateway.
//!
//! An engine that starts anew holds nothing: new books, a new epoch. What it dropped by itself is found out from the
//! `usage` of its answers.

pub mod books;
pub mod events;
pub mod feed;
pub mod handback;
pub mod hold;
pub mod local;
pub mod names;
pub mod scale;
pub mod slots;
pub mod trust;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::core::options::Options;
use crate::core::types::{Millis, Tokens};
use crate::engines::Engine;
use crate::engines::fetch::{Fetch, Unwell};
use crate::engines::reading::{Pulse, Reading};
use crate::watch::{Follower, Watch};
use crate::wire::PROTOCOL;
use crate::wire::info::{KvRole, NodeInfo};
use books::Books;
use events::{Heard, Publisher};

/// Between two looks at an engine.
const EVERY: Duration = Duration::from_secs(1);
/// Looks in a row without an answer in time until an engine counts as down.
const LATE: u32 = 3;

/// Set-up of keepers.
#[derive(Debug, Clone)]
pub struct Config {
    /// The engines.
    pub engine: Engine,
    /// The algorithm.
    pub options: Options,
    /// `K_d` of each, where it is given: over what the engine says.
    pub k_d: Option<Tokens>,
    /// Where engines publish KV events, by their base URLs.
    pub kv_events: HashMap<String, Publisher>,
    /// Chains are of the engine's tokens.
    pub exact: bool,
}

/// Keeps the books of one engine.
#[derive(Debug)]
pub struct Keeper {
    url: Arc<str>,
    config: Arc<Config>,
    fetch: Fetch,
    life: Mutex<Life>,
    events: Mutex<Heard>,
    changed: Arc<Watch<u64>>,
    look: Notify,
    started: Instant,
}

#[derive(Debug, Default)]
struct Life {
    books: Option<Books>,
    reading: Reading,
    /// The engine went away, and its KV with it: the next contact begins a new life.
    over: bool,
    lives: u64,
    /// It was asked to hand KV back, and cannot.
    no_handles: bool,
}

impl Keeper {
    /// A keeper for the engine at `url` that was not asked anything yet.
    pub fn new(url: Arc<str>, config: Arc<Config>, fetch: Fetch) -> Arc<Self> {
        Arc::new(Self {
            url,
            config,
            fetch,
            life: Mutex::default(),
            events: Mutex::new(Heard::from_start()),
            changed: Watch::new(0),
            look: Notify::new(),
            started: Instant::now(),
        })
    }

    /// One step on the books, at one point in time. `None`: the engine was never up.
    pub fn with<R>(&self, step: impl FnOnce(&mut Books, Millis) -> R) -> Option<R> {
        let now = self.now();
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let books = life.books.as_mut()?;
        let out = step(books, now);
        let touched = books.settle(now);
        drop(life);
        if touched {
            self.touch();
        }
        Some(out)
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    fn touch(&self) {
        self.changed.modify(|version| *version += 1);
    }

    /// Counts up with every change of the books.
    pub fn changes(&self) -> Follower<u64> {
        Follower::new(&self.changed)
    }

    /// Asks the engine what it is, and begins a new life where the last one is over.
    ///
    /// # Errors
    /// It is not up, or not fit for what it is to do; in words for people.
    pub async fn meet(&self) -> Result<NodeInfo, Unwell> {
        let reading = self.config.engine.read(&self.fetch, &self.url).await?;
        let pulse = self.config.engine.pulse(&self.fetch, &self.url).await?;
        let k_d = self.config.k_d.or(reading.k_d).ok_or_else(|| {
            Unwell::Unfit("it does not say how large its KV pool is: set `fleet.k_d` (tokens)".into())
        })?;
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let same = life.books.as_ref().is_some_and(|books| !life.over && !fell(&books.pulse, &pulse));
        let pool = |reading: &Reading| (reading.k_d, reading.slots, reading.block);
        let resized = pool(&life.reading) != pool(&reading);
        life.reading = reading;
        if !same || resized {
            let epoch = rand::random::<u64>().max(1);
            life.books = Some(Books::new(&self.config.options, &life.reading, k_d, epoch));
            life.over = false;
            life.no_handles = false;
            if life.lives > 0 {
                *self.events() = Heard::from_start();
            }
            if let Some(model) = life.reading.models.first().filter(|_| self.config.exact) {
                self.events().name(model);
            }
            life.lives += 1;
        }
        let info = self.info(&life, k_d);
        if let Some(books) = &mut life.books {
            books.pulse = pulse;
        }
        drop(life);
        self.touch();
        Ok(info)
    }

    fn info(&self, life: &Life, k_d: Tokens) -> NodeInfo {
        let roles = match life.reading.roles.is_empty() {
            true => vec![KvRole::Prefill, KvRole::Decode],
            false => life.reading.roles.clone(),
        };
        NodeInfo {
            protocol: PROTOCOL,
            name: self.url.to_string(),
            epoch: life.books.as_ref().map_or(0, Books::epoch),
            roles,
            model: life.reading.models.first().cloned().unwrap_or_default(),
            k_d,
            block_tokens: self.config.options.block_tokens,
            kv_bytes_per_token: 0,
            kv_addr: life.reading.meets.clone(),
            d2p_addr: self.config.engine.hands_back().then(|| self.url.to_string()),
        }
    }

    fn events(&self) -> MutexGuard<'_, Heard> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a message of the engine's events.
    fn heard(&self, frames: &[&[u8]]) {
        let mut events = self.events();
        let news = events.take(frames);
        drop(events);
        match news {
            Err(why) => tracing::warn!(engine = %self.url, why, "a KV event that cannot be read"),
            Ok(news) if news.anew => {
                self.ends();
                self.suspect();
            }
            Ok(news) => {
                self.with(|books, _| {
                    if news.cleared {
                        books.ledger.forget_all();
                    }
                });
            }
        }
    }

    /// Watches the engine, and listens to it, until it goes away or starts anew; says which.
    pub async fn watch(&self) -> Unwell {
        let listen = async {
            match self.config.kv_events.get(&*self.url) {
                Some(publisher) => events::listen(self, publisher).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            unwell = self.look_after() => unwell,
            () = listen => Unwell::Slow,
        }
    }

    async fn look_after(&self) -> Unwell {
        // Times in a row that it was late, or that a connection broke.
        let (mut late, mut broken) = (0, 0);
        loop {
            if broken == 0 {
                tokio::select! {
                    () = sleep(EVERY) => {}
                    () = self.look.notified() => {}
                }
            }
            match self.config.engine.pulse(&self.fetch, &self.url).await {
                Ok(pulse) => {
                    // Behind a broken connection only a counter can show that it is still the same engine.
                    let doubtful = broken > 0 && pulse.work.is_none();
                    if doubtful || self.beats(pulse) || !self.is_up() {
                        self.ends();
                        return Unwell::Gone("it has started anew".into());
                    }
                    (late, broken) = (0, 0);
                    self.complain_of_silence();
                    self.believe_events();
                }
                Err(Unwell::Gone(_)) if broken == 0 => broken = 1,
                Err(Unwell::Slow) if late + 1 < LATE => late += 1,
                // Its KV may still be there: the next contact shows whether it is the same.
                Err(Unwell::Slow) => return Unwell::Slow,
                Err(unwell) => {
                    self.ends();
                    return unwell;
                }
            }
        }
    }

    /// The books hold nothing that the engine has dropped, and no more than its events have told of, once all of them are
    /// in.
    fn believe_events(&self) {
        let (lost, cached) = {
            let mut events = self.events();
            (events.lost(), events.settled())
        };
        if !lost.is_empty() {
            self.with(|books, _| books.ledger.lost(&lost));
        }
        if let Some(cached) = cached {
            self.with(|books, _| books.bound(cached));
        }
    }

    fn complain_of_silence(&self) {
        if self.config.kv_events.contains_key(&*self.url) && self.events().is_silent() {
            tracing::warn!(engine = %self.url, "it serves turns and publishes no KV events: `usage` alone tells what it holds");
        }
    }

    /// Takes a pulse. Returns whether it is another engine's.
    fn beats(&self, pulse: Pulse) -> bool {
        self.with(|books, _| {
            let anew = fell(&books.pulse, &pulse);
            books.pulse = pulse;
            anew
        })
        .unwrap_or(true)
    }

    fn ends(&self) {
        self.life.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        self.touch();
    }

    /// What the engine said of itself when it was met.
    fn reading(&self) -> Reading {
        self.life.lock().unwrap_or_else(PoisonError::into_inner).reading.clone()
    }

    /// The present life; 0 before the first.
    fn epoch(&self) -> u64 {
        self.with(|books, _| books.epoch()).unwrap_or(0)
    }

    /// Whether the engine was there when it was last looked at.
    pub fn is_up(&self) -> bool {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        life.books.is_some() && !life.over
    }

    /// Whether KV can go back from here to a P.
    pub fn hands_back(&self) -> bool {
        !self.life.lock().unwrap_or_else(PoisonError::into_inner).no_handles
    }

    fn gives_no_handles(&self) {
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut life.no_handles, true) {
            tracing::warn!(engine = %self.url, "it gives no handles on its KV, so none goes back to a prefill worker: \
                was it started with a KV connector?");
        }
    }

    /// A turn had trouble with the engine: look at it now.
    pub fn suspect(&self) {
        self.look.notify_one();
    }

    /// What `/admin/workers` shows.
    pub fn observe(&self) -> Value {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let given = self.config.k_d.is_some();
        json!({
            "kind": self.config.engine.kind.as_str(),
            "lives": life.lives,
            "models": life.reading.models,
            "hands_back": self.config.engine.hands_back() && !life.no_handles,
            "k_d_from": if given { "settings" } else { "engine" },
            "kv_events": self.config.kv_events.contains_key(&*self.url).then(|| self.events().observe()),
            "books": life.books.as_ref().map(Books::observe),
        })
    }
}

/// Whether an engine's counter fell: it has started anew.
fn fell(before: &Pulse, now: &Pulse) -> bool {
    before.work.zip(now.work).is_some_and(|(before, now)| now < before)
}
