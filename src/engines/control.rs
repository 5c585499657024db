//! Calls to worker nodes over HTTP: Admit, leases, the event stream. Its own small connection pool, apart from
//! the bytes of turns, since it runs on whatever thread a worker actor lives on.

use bytes::Bytes;
use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, BodyStream, Full};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use super::client::Connector;
use super::outbound::{Outbound, causes};
use crate::actors::api::WorkerRef;
use crate::actors::transport::{EventStream, Transport, TransportError};
use crate::core::types::BlockHash;
use crate::wire::admit::{self, AdmitAnswer, AdmitHead, LeaseCall};
use crate::wire::events::{Decoder, Numbered};
use crate::wire::info::NodeInfo;

/// Largest JSON answer read from a node, in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// Characters of a refusal that are passed on.
const MAX_REFUSAL: usize = 300;

/// See the module.
#[derive(Debug, Clone)]
pub struct HttpTransport(Outbound);

impl HttpTransport {
    /// A transport over such connections.
    pub fn new(how: &Connector) -> Self {
        Self(Outbound::new(how))
    }

    async fn send(
        &self,
        method: Method,
        worker: &WorkerRef,
        path: &str,
        content_type: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, TransportError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", worker.url))
            .header(header::CONTENT_TYPE, content_type)
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| TransportError::Protocol(e.to_string()))?;
        let response = self.0.send(request).await.map_err(TransportError::Connect)?;
        match response.status() {
            StatusCode::OK => Ok(response),
            status => {
                let said = said(response).await;
                Err(TransportError::Protocol(format!("{path} answered {status}: {said}")))
            }
        }
    }
}

/// The beginning of what a refusal says, in one line.
async fn said(response: Response<Incoming>) -> String {
    let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER);
    let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_REFUSAL).collect()
}

async fn json<T: DeserializeOwned>(response: Response<Incoming>) -> Result<T, TransportError> {
    let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER);
    let bytes = body.collect().await.map_err(|e| TransportError::Connect(e.to_string()))?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|e| TransportError::Protocol(e.to_string()))
}

impl Transport for HttpTransport {
    fn info<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>> {
        async move {
            json(self.send(Method::GET, worker, "/kvc/info", "application/json", Vec::new()).await?).await
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
            let body = admit::encode(&head, appended).map_err(|e| TransportError::Protocol(e.to_string()))?;
            let path = "/admit_direct_append";
            json(self.send(Method::POST, worker, path, admit::CONTENT_TYPE, body).await?).await
        }
        .boxed()
    }

    fn release<'a>(
        &'a self,
        worker: &'a WorkerRef,
        call: LeaseCall,
    ) -> BoxFuture<'a, Result<(), TransportError>> {
        async move {
            let body = serde_json::to_vec(&call).map_err(|e| TransportError::Protocol(e.to_string()))?;
            self.send(Method::POST, worker, "/kvc/leases/release", "application/json", body).await.map(drop)
        }
        .boxed()
    }

    fn events<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<EventStream, TransportError>> {
        async move {
            let response =
                self.send(Method::GET, worker, "/kvc/events", "application/json", Vec::new()).await?;
            Ok(decoded(response.into_body()))
        }
        .boxed()
    }
}

/// The messages of an event stream, as they arrive.
fn decoded(body: Incoming) -> EventStream {
    let state = (BodyStream::new(body), Decoder::default());
    futures_util::stream::try_unfold(state, |(mut body, mut decoder)| async move {
        loop {
            let next: Option<Numbered> =
                decoder.next_message().map_err(|e| TransportError::Protocol(e.to_string()))?;
            if let Some(message) = next {
                return Ok(Some((message, (body, decoder))));
            }
            match body.next().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(TransportError::Connect(causes(&error))),
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        decoder.push(data);
                    }
                }
            }
        }
    })
    .boxed()
}
