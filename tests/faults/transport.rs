//! Control calls over the simulated network: a message each, so that each can be lost, delayed, doubled or
//! overtaken. They end at the real handlers of the real nodes.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Body as _;
use kvc_router::actors::api::WorkerRef;
use kvc_router::actors::transport::{EventStream, Transport, TransportError};
use kvc_router::core::types::BlockHash;
use kvc_router::node::http::{self as node_http, Body};
use kvc_router::wire::admit::{AdmitAnswer, AdmitHead, CONTENT_TYPE, LeaseCall, encode};
use kvc_router::wire::events::{Decoder, NodeEvent, Numbered};
use kvc_router::wire::info::NodeInfo;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::dice::{Fate, Msg};
use super::net::{Endpoint, Host, Net};
use super::node::Life;

type Answer = Result<Response<Body>, TransportError>;

fn gone(what: &str) -> TransportError {
    TransportError::Connect(what.into())
}

fn request(method: Method, path: &str, content_type: &str, body: Vec<u8>) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("content-type", content_type);
    request.body(Full::new(body.into())).unwrap()
}

impl Endpoint {
    /// One message and its reply.
    async fn call(&self, at: &WorkerRef, msg: Msg, make: impl Fn() -> Request<Full<Bytes>> + Send) -> Answer {
        let Some(place) = self.net.host(&at.name) else { return Err(gone("no such host")) };
        self.net.message(msg, place as u64, u64::from(self.host.0));
        let fate = self.net.dice.fate(msg);
        if msg == Msg::Lease && fate != Fate::Deliver {
            self.net.rules.loses_releases();
        }
        match fate {
            Fate::Drop => return std::future::pending().await,
            Fate::Cut => return Err(gone("reset")),
            Fate::Delay(by) => sleep(by).await,
            Fate::Reorder => net_overtakes(&self.net).await,
            Fate::Duplicate(by) => {
                let (endpoint, copy) = (self.clone(), make());
                tokio::spawn(async move {
                    sleep(by).await;
                    endpoint.deliver(place, msg, copy).await
                });
            }
            _ => {}
        }
        let (tell, told) = oneshot::channel();
        let (endpoint, request) = (self.clone(), make());
        // On its way it no longer depends on the sender's patience.
        tokio::spawn(async move { tell.send(endpoint.deliver(place, msg, request).await) });
        let answer = told.await.unwrap_or_else(|_| Err(gone("died")));
        match fate {
            Fate::LoseReply => std::future::pending().await,
            Fate::CutBehind => Err(gone("reset")),
            _ => answer,
        }
    }

    async fn deliver(&self, place: usize, msg: Msg, request: Request<Full<Bytes>>) -> Answer {
        let (net, to) = (&self.net, Host(place as u8));
        sleep(net.latency(self.host, to)).await;
        net.passes(self.host, to).await;
        let node = net.nodes[place].clone();
        let Some(life) = node.life() else { return Err(gone("refused")) };
        let (tell, told) = oneshot::channel();
        let (app, net_of_node) = (life.app.clone(), net.clone());
        node.spawn(&life, async move {
            let before = app.engine.with(|s, _| s.ledger.kept_blocks());
            let mut answer = node_http::answer(&app, request).await;
            if msg == Msg::Admit {
                net_of_node.rules.admitted(&app.engine, before);
                answer = net_of_node.rules.look(&app.engine, answer).await;
            }
            let _ = tell.send(answer);
        });
        let answer = told.await.map_err(|_| gone("died"))?;
        sleep(net.latency(self.host, to)).await;
        net.passes(self.host, to).await;
        Ok(answer)
    }
}

/// Waits until another message has gone by.
async fn net_overtakes(net: &Net) {
    let before = net.messages();
    for _ in 0..200 {
        sleep(Duration::from_millis(5)).await;
        if net.messages() > before + 1 {
            return;
        }
    }
}

async fn json<T: serde::de::DeserializeOwned>(answer: Response<Body>) -> Result<T, TransportError> {
    let status = answer.status();
    let bytes = answer.into_body().collect().await.map_err(|e| gone(&e.to_string()))?.to_bytes();
    if !status.is_success() {
        return Err(TransportError::Protocol(status.to_string()));
    }
    serde_json::from_slice(&bytes).map_err(|e| TransportError::Protocol(e.to_string()))
}

impl Transport for Endpoint {
    fn info<'a>(&'a self, at: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>> {
        async move {
            let make = || request(Method::GET, "/kvc/info", "application/json", Vec::new());
            json(self.call(at, Msg::Info, make).await?).await
        }
        .boxed()
    }

    fn admit<'a>(
        &'a self,
        at: &'a WorkerRef,
        head: AdmitHead,
        appended: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<AdmitAnswer, TransportError>> {
        async move {
            let body = encode(&head, appended).unwrap();
            let make = || request(Method::POST, "/admit_direct_append", CONTENT_TYPE, body.clone());
            let answer = json(self.call(at, Msg::Admit, make).await?).await?;
            self.net.trace.push(
                "admit answer",
                at.id.0.into(),
                u64::from(matches!(answer, AdmitAnswer::Admitted { .. })),
            );
            self.net.rules.answered(&head, &at.name, &answer);
            Ok(answer)
        }
        .boxed()
    }

    fn release<'a>(
        &'a self,
        at: &'a WorkerRef,
        call: LeaseCall,
    ) -> BoxFuture<'a, Result<(), TransportError>> {
        async move {
            let body = serde_json::to_vec(&call).unwrap();
            self.net.rules.gave_back(&call.request_id);
            let make = || request(Method::POST, "/kvc/leases/release", "application/json", body.clone());
            self.call(at, Msg::Lease, make).await.map(drop)
        }
        .boxed()
    }

    fn events<'a>(&'a self, at: &'a WorkerRef) -> BoxFuture<'a, Result<EventStream, TransportError>> {
        async move {
            let make = || request(Method::GET, "/kvc/events", "application/json", Vec::new());
            let place = self.net.host(&at.name).ok_or_else(|| gone("no such host"))?;
            let life = self.net.nodes[place].life().ok_or_else(|| gone("refused"))?;
            let answer = self.call(at, Msg::Info, make).await?;
            let reader = Reader {
                endpoint: self.clone(),
                place,
                life,
                body: answer.into_body(),
                decoder: Decoder::default(),
                ready: VecDeque::new(),
                held_back: None,
            };
            Ok(futures_util::stream::try_unfold(reader, |mut reader| async move {
                Ok(reader.next().await?.map(|message| (message, reader)))
            })
            .boxed())
        }
        .boxed()
    }
}

/// One event stream.
struct Reader {
    endpoint: Endpoint,
    place: usize,
    life: Arc<Life>,
    body: Body,
    decoder: Decoder,
    ready: VecDeque<Numbered>,
    held_back: Option<Numbered>,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<Numbered>, TransportError> {
        let (net, to) = (self.endpoint.net.clone(), Host(self.place as u8));
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Ok(Some(message));
            }
            let gate = net.nodes[self.place].gate.clone();
            let body = &mut self.body;
            let frame = std::future::poll_fn(|cx| {
                std::task::ready!(gate.poll(cx));
                Pin::new(&mut *body).poll_frame(cx)
            });
            let frame = tokio::select! {
                biased;
                () = self.life.dead.cancelled() => return Err(gone("reset")),
                frame = frame => frame,
            };
            let Some(frame) = frame else { return Ok(None) };
            let frame = frame.map_err(|e| gone(&e.to_string()))?;
            sleep(net.latency(self.endpoint.host, to)).await;
            net.passes(self.endpoint.host, to).await;
            if let Some(data) = frame.data_ref() {
                self.decoder.push(data);
            }
            while let Some(message) =
                self.decoder.next_message().map_err(|e| TransportError::Protocol(e.to_string()))?
            {
                self.arrives(message).await?;
            }
        }
    }

    async fn arrives(&mut self, message: Numbered) -> Result<(), TransportError> {
        let net = self.endpoint.net.clone();
        if matches!(message.event, NodeEvent::Load(_)) {
            net.trace.push("load", self.place as u64, message.seq);
            self.ready.push_back(message);
            return Ok(());
        }
        net.message(Msg::Event, self.place as u64, message.seq);
        let late = net.rules.remember(self.place, &net.nodes[self.place].name, &message);
        let late = late.filter(|_| net.dice.is_late());
        match net.dice.fate(Msg::Event) {
            Fate::Drop => return Ok(()),
            Fate::Cut => return Err(gone("reset")),
            Fate::Delay(by) => sleep(by).await,
            Fate::Duplicate(_) => self.ready.push_back(message.clone()),
            Fate::Reorder if matches!(message.event, NodeEvent::Changes(_)) => {
                self.held_back = Some(message);
                return Ok(());
            }
            _ => {}
        }
        self.ready.push_back(message);
        self.ready.extend(self.held_back.take());
        self.ready.extend(late);
        Ok(())
    }
}
