//! Calls to worker nodes over HTTP: Admit, leases, the event stream. Its own small connection pool, apart from
//! the bytes of turns, since it runs on whatever thread a worker actor lives on.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, BodyStream, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;

use super::client::Connector;
use crate::actors::api::WorkerRef;
use crate::actors::transport::{EventStream, Transport, TransportError};
use crate::core::types::BlockHash;
use crate::wire::admit::{self, AdmitAnswer, AdmitHead, LeaseCall};
use crate::wire::events::{Decoder, Numbered};
use crate::wire::info::NodeInfo;

/// Largest JSON answer read from a node, in bytes.
const MAX_ANSWER: usize = 64 << 10;

type Secure = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// See the module.
#[derive(Debug, Clone)]
pub struct HttpTransport {
    plain: Client<HttpConnector, Full<Bytes>>,
    /// Made when the first https worker is called: the system's authorities take a while to read.
    secure: Arc<OnceLock<Result<Secure, String>>>,
    how: Connector,
    /// Shown with every call.
    authorization: Option<HeaderValue>,
}

impl HttpTransport {
    /// A transport over such connections.
    pub fn new(how: &Connector) -> Self {
        let authorization = how.key().and_then(|key| HeaderValue::from_str(&format!("Bearer {key}")).ok());
        let authorization = authorization.map(|mut value| {
            value.set_sensitive(true);
            value
        });
        let plain = builder().build(connector(how));
        Self { plain, secure: Arc::default(), how: how.clone(), authorization }
    }

    fn secure(&self) -> Result<&Secure, TransportError> {
        let client = self.secure.get_or_init(|| {
            let tls = Arc::unwrap_or_clone(self.how.tls()?);
            let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1();
            let mut http = connector(&self.how);
            http.enforce_http(false);
            Ok(builder().build(https.wrap_connector(http)))
        });
        client.as_ref().map_err(|error| TransportError::Connect(error.clone()))
    }

    async fn send(
        &self,
        method: Method,
        worker: &WorkerRef,
        path: &str,
        content_type: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, TransportError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", worker.url))
            .header(header::CONTENT_TYPE, content_type);
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| TransportError::Protocol(e.to_string()))?;
        let sent = match request.uri().scheme_str() {
            Some("https") => self.secure()?.request(request),
            _ => self.plain.request(request),
        };
        let response = sent.await.map_err(connect)?;
        match response.status() {
            StatusCode::OK => Ok(response),
            status => Err(TransportError::Protocol(format!("{path} answered {status}"))),
        }
    }
}

fn connector(how: &Connector) -> HttpConnector {
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.set_connect_timeout(Some(how.timeout()));
    http
}

fn builder() -> hyper_util::client::legacy::Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    // Under the 5 s after which common servers close an idle connection.
    builder.pool_idle_timeout(Duration::from_secs(4));
    builder
}

fn connect(error: impl std::error::Error) -> TransportError {
    // The cause says more than "client error (Connect)".
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    TransportError::Connect(text)
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
                Some(Err(error)) => return Err(connect(error)),
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
