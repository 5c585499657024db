//! The keepers of a gateway: one for each engine it was asked about, as the transport to their "nodes".

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::Value;

use super::feed::{News, Reader, Source};
use super::{Config, Keeper};
use crate::actors::api::WorkerRef;
use crate::actors::transport::{EventStream, Transport, TransportError};
use crate::core::types::BlockHash;
use crate::engines::fetch::{Fetch, Unwell};
use crate::watch::Follower;
use crate::wire::admit::{AdmitAnswer, AdmitHead, LeaseCall};
use crate::wire::events::Decoder;
use crate::wire::info::NodeInfo;

/// See the module. Clones share everything.
#[derive(Debug, Clone)]
pub struct Keepers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: Arc<Config>,
    fetch: Fetch,
    all: Mutex<HashMap<Arc<str>, Arc<Keeper>>>,
}

impl Keepers {
    /// No keeper yet: each begins when its worker is first asked about.
    pub fn new(config: Config, connect_timeout: Duration) -> Self {
        let fetch = Fetch::new(connect_timeout);
        Self(Arc::new(Inner { config: Arc::new(config), fetch, all: Mutex::default() }))
    }

    /// The keeper of a worker's engine.
    pub fn of(&self, worker: &WorkerRef) -> Arc<Keeper> {
        let mut all = self.0.all.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Keeper::new(worker.url.clone(), self.0.config.clone(), self.0.fetch.clone());
        all.entry(worker.url.clone()).or_insert_with(new).clone()
    }
}

impl From<Unwell> for TransportError {
    fn from(unwell: Unwell) -> Self {
        match unwell {
            Unwell::Unfit(what) => Self::Protocol(what),
            unwell => Self::Connect(unwell.to_string()),
        }
    }
}

impl Transport for Keepers {
    fn info<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>> {
        async move { Ok(self.of(worker).meet().await?) }.boxed()
    }

    fn admit<'a>(
        &'a self,
        worker: &'a WorkerRef,
        head: AdmitHead,
        appended: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<AdmitAnswer, TransportError>> {
        async move {
            let answer = self.of(worker).with(|books, now| {
                let request_id = head.request_id.clone();
                let Some(request) = head.request(appended, books.ledger.residency()) else {
                    return AdmitAnswer::Resend;
                };
                let reply = books.admit(request, now);
                AdmitAnswer::of(reply, &request_id, books.epoch(), now)
            });
            answer.ok_or_else(|| TransportError::Connect("it was never up".into()))
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
        let stream = followed(self.of(worker));
        async move { Ok(stream) }.boxed()
    }

    fn observe(&self, worker: &WorkerRef) -> Option<Value> {
        Some(self.of(worker).observe())
    }
}

/// The keeper's changes for as long as its engine is the same. Looking after the engine is part of the stream, so it
/// ends with its reader.
fn followed(keeper: Arc<Keeper>) -> EventStream {
    let watched = {
        let keeper = keeper.clone();
        async move { keeper.watch().await }.boxed()
    };
    let state = (Reader::new(keeper, None), Decoder::default(), watched);
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
        // No books: the epoch is 0, which no reader has begun in.
        news.unwrap_or(News { epoch: 0, seq: 0, changes: Ok(Vec::new()), load: Default::default() })
    }
}
