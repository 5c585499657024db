//! The keepers of a gateway: one for each engine it was asked about, as the transport to their "nodes".

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::Value;

use super::feed::{News, Reader, Source};
use super::{Config, Keeper};
use crate::actors::api::WorkerRef;
use crate::actors::slot::Role;
use crate::actors::transport::{EventStream, Transport, TransportError};
use crate::core::types::{BlockHash, Mode, RejectReason};
use crate::engines::Pair;
use crate::engines::client::Connector;
use crate::engines::fetch::{Fetch, Unwell};
use crate::watch::Follower;
use crate::wire::admit::{AdmitAnswer, AdmitHead, LeaseCall};
use crate::wire::events::Decoder;
use crate::wire::info::NodeInfo;

/// See the module. Clones share everything.
#[derive(Debug, Clone)]
pub struct Keepers(Arc<Inner>);

type ByUrl = HashMap<Arc<str>, (Role, Arc<Keeper>)>;

#[derive(Debug)]
struct Inner {
    config: Arc<Config>,
    fetch: Fetch,
    all: Mutex<ByUrl>,
    /// Pairs of epochs, of a P and a D, that know each other.
    introduced: Mutex<HashSet<(u64, u64)>>,
}

impl Keepers {
    /// No keeper yet: each begins when its worker is first asked about.
    pub fn new(config: Config, how: &Connector) -> Self {
        let fetch = Fetch::new(how);
        Self(Arc::new(Inner {
            config: Arc::new(config),
            fetch,
            all: Mutex::default(),
            introduced: Mutex::default(),
        }))
    }

    /// Their set-up.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The keeper of a worker's engine.
    pub fn of(&self, worker: &WorkerRef) -> Arc<Keeper> {
        let new = || Keeper::new(worker.url.clone(), self.0.config.clone(), self.0.fetch.clone());
        self.all().entry(worker.url.clone()).or_insert_with(|| (worker.role, new())).1.clone()
    }

    /// The keeper of the engine at a URL, if there is one.
    pub fn at(&self, url: &str) -> Option<Arc<Keeper>> {
        self.all().get(url).map(|(_, keeper)| keeper.clone())
    }

    fn all(&self) -> MutexGuard<'_, ByUrl> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keepers of a role whose engines are up.
    fn up(&self, role: Role) -> Vec<Arc<Keeper>> {
        let all = self.all();
        all.values().filter(|(own, keeper)| *own == role && keeper.is_up()).map(|(_, k)| k.clone()).collect()
    }

    /// What keeps a P from working with the fleet's D workers.
    fn misfit(&self, worker: &WorkerRef) -> Option<Unwell> {
        if worker.role != Role::Prefill {
            return None;
        }
        let (p, d) = (self.of(worker).reading(), self.up(Role::Decode).first()?.reading());
        let why = match (p.models.first() == d.models.first(), p.block == d.block) {
            (true, true) => return None,
            (false, _) => format!("it serves {:?}, the decode workers {:?}", p.models, d.models),
            (_, false) => {
                let of = |block: Option<u32>| block.map_or("unknown".to_owned(), |b| b.to_string());
                format!("its KV blocks are {} tokens, the decode workers' {}", of(p.block), of(d.block))
            }
        };
        Some(Unwell::Unfit(why))
    }

    /// Introduces an engine that has just come up to those it will work with, so that no turn waits for that.
    async fn introduce(&self, worker: &WorkerRef) {
        let own = self.of(worker);
        let others = match worker.role {
            Role::Prefill => self.up(Role::Decode),
            Role::Decode => self.up(Role::Prefill),
        };
        for other in others {
            let (d, p) = match worker.role {
                Role::Prefill => (&other, &own),
                Role::Decode => (&own, &other),
            };
            let pair = (p.epoch(), d.epoch());
            if !self.0.introduced.lock().unwrap_or_else(PoisonError::into_inner).insert(pair) {
                continue;
            }
            let model = p.reading().models.first().cloned().unwrap_or_default();
            let meets = p.reading().meets;
            let pair = Pair { decode: &d.url, prefill: &p.url, meets: meets.as_deref() };
            let meet = || self.0.config.engine.introduce(&self.0.fetch, &model, pair);
            // The first handshake of two busy engines may miss its deadline.
            let met = match meet().await {
                Ok(()) => Ok(()),
                Err(_) => meet().await,
            };
            if let Err(why) = met {
                tracing::warn!(p = %p.url, d = %d.url, why, "a P and a D do not work together: turns over both will fail");
            }
        }
    }
}

impl From<Unwell> for TransportError {
    fn from(unwell: Unwell) -> Self {
        match unwell {
            Unwell::Unfit(what) => Self::Unfit(what),
            unwell => Self::Connect(unwell.to_string()),
        }
    }
}

impl Transport for Keepers {
    /// Meeting an engine is several questions to a server that may be busy with a prompt; each has a limit of its own.
    fn patience(&self) -> Duration {
        Duration::from_secs(20)
    }

    fn info<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>> {
        async move {
            let info = self.of(worker).meet().await?;
            self.misfit(worker).map_or(Ok(info), |unwell| Err(unwell.into()))
        }
        .boxed()
    }

    fn admit<'a>(
        &'a self,
        worker: &'a WorkerRef,
        head: AdmitHead,
        appended: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<AdmitAnswer, TransportError>> {
        async move {
            let (keeper, request_id) = (self.of(worker), head.request_id.clone());
            let answer = keeper.with(|books, now| {
                let Some(request) = head.clone().request(appended, books.ledger.residency()) else {
                    return AdmitAnswer::Resend;
                };
                let reply = books.admit(request, now);
                AdmitAnswer::of(reply, &request_id, books.epoch(), now)
            });
            let answer = answer.ok_or_else(|| TransportError::Connect("it was never up".into()))?;
            let AdmitAnswer::Admitted { mode: Mode::Direct, terms, .. } = &answer else { return Ok(answer) };
            // A caller that gives up meanwhile returns the lease itself.
            let agreed = self.config().engine.admits(&self.0.fetch, &worker.url, &head).await;
            if agreed != Ok(true) {
                keeper.with(|books, now| books.give_back(&request_id, now));
            }
            match agreed? {
                true => Ok(answer),
                false => Ok(AdmitAnswer::Rejected { reason: RejectReason::NoDCapacity, terms: *terms }),
            }
        }
        .boxed()
    }

    fn release<'a>(
        &'a self,
        worker: &'a WorkerRef,
        call: LeaseCall,
    ) -> BoxFuture<'a, Result<(), TransportError>> {
        async move {
            self.of(worker).with(|books, now| {
                if call.is_for(books.epoch()) {
                    books.give_back(&call.request_id, now);
                }
            });
            Ok(())
        }
        .boxed()
    }

    fn events<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<EventStream, TransportError>> {
        let stream = followed(self.clone(), worker.clone());
        async move { Ok(stream) }.boxed()
    }

    fn forget(&self, worker: &WorkerRef) {
        self.all().remove(&worker.url);
    }

    fn observe(&self, worker: &WorkerRef) -> Option<Value> {
        Some(self.of(worker).observe())
    }
}

/// The keeper's changes for as long as its engine is the same. Looking after the engine is part of the stream, so it
/// ends with its reader.
fn followed(keepers: Keepers, worker: WorkerRef) -> EventStream {
    let keeper = keepers.of(&worker);
    let reader = Reader::new(keeper.clone(), None);
    let watched = async move {
        let beside = async {
            keepers.introduce(&worker).await;
            loop {
                tokio::time::sleep(super::EVERY).await;
                if let Some(unwell) = keepers.misfit(&worker) {
                    return unwell;
                }
            }
        };
        tokio::select! {
            unwell = keeper.watch() => unwell,
            unwell = beside => unwell,
        }
    };
    let state = (reader, Decoder::default(), watched.boxed());
    let stream =
        futures_util::stream::try_unfold(state, |(mut reader, mut decoder, mut watched)| async move {
            loop {
                let next = decoder.next_message().map_err(|e| TransportError::Protocol(e.to_string()))?;
                if let Some(message) = next {
                    return Ok(Some((message, (reader, decoder, watched))));
                }
                tokio::select! {
                    biased;
                    unwell = &mut watched => return Err(TransportError::from(unwell)),
                    piece = reader.next() => match piece {
                        Some(piece) => decoder.push(&piece),
                        None => return Ok(None),
                    },
                }
            }
        });
    stream.boxed()
}

impl Source for Arc<Keeper> {
    fn changes(&self) -> Follower<u64> {
        Keeper::changes(self)
    }

    fn at(&self) -> (u64, u64) {
        self.with(|books, _| (books.epoch(), books.log.seq())).unwrap_or_default()
    }

    fn news(&self, after: Option<u64>) -> News {
        let news = self.with(|books, _| News {
            epoch: books.epoch(),
            seq: books.log.seq(),
            changes: after.and_then(|after| books.log.since(after)).ok_or_else(|| books.snapshot()),
            load: books.load(),
        });
        // No engine: the epoch is 0, which no reader has begun in.
        news.filter(|_| self.is_up()).unwrap_or(News {
            epoch: 0,
            seq: 0,
            changes: Ok(Vec::new()),
            load: Default::default(),
        })
    }
}
