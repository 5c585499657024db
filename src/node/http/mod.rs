//! The node's HTTP server: one task per connection. A client that goes away takes its turn with it, also before
//! the answer began: the connection's task owns the turn, and the server reads on while it works.

mod admit;
mod answer;
mod events;
mod generate;
mod routes;
mod sse;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::prompt::Api;
use crate::wire::info::{KvRole, NodeInfo};

use super::builtin::engine::Engine;
use super::builtin::kept::Kept;
use super::error::NodeError;

/// What the handlers share.
#[derive(Debug)]
pub struct App {
    /// The engine.
    pub engine: Arc<Engine>,
    /// What the node says of itself.
    pub info: NodeInfo,
    /// It takes no new turns.
    pub draining: AtomicBool,
    /// Responses that later requests may continue.
    pub kept: Kept,
    /// Numbers requests that bring no id.
    pub requests: AtomicU64,
}

impl App {
    fn role(&self, role: KvRole) -> Result<(), NodeError> {
        if self.engine.config.roles.contains(&role) {
            return Ok(());
        }
        Err(NodeError::role(format!("worker {} does not have the role {role:?}", self.info.name)))
    }

    /// Refuses what nobody was promised: a draining node serves the leases it granted and takes nothing new.
    fn takes_new_turns(&self) -> Result<(), NodeError> {
        if self.draining.load(Ordering::Relaxed) { Err(NodeError::draining()) } else { Ok(()) }
    }

    fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:x}-{number}", self.engine.epoch)
    }
}

/// A response body; an error cuts the connection, so that a broken stream does not look complete.
type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Serves connections until it is dropped; that ends them too.
pub async fn listen(app: Arc<App>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "HTTP listener");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        if stream.set_nodelay(true).is_err() {
            continue;
        }
        let app = app.clone();
        let service = service_fn(move |request| {
            let app = app.clone();
            async move {
                let api = Api::from_path(request.uri().path());
                let response = routes::handle(&app, request).await;
                Ok::<_, Infallible>(response.unwrap_or_else(|error| error_response(&error, api)))
            }
        });
        // No header timeout: it would also cut connections that a gateway keeps at rest.
        let serve =
            http1::Builder::new().header_read_timeout(None).serve_connection(TokioIo::new(stream), service);
        connections.spawn(async move {
            if let Err(error) = serve.await {
                tracing::debug!(%error, "HTTP connection");
            }
        });
    }
}

fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

fn response(status: StatusCode, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn json(value: &impl Serialize) -> Result<Response<Body>, NodeError> {
    let bytes = serde_json::to_vec(value).map_err(|e| NodeError::internal(e.to_string()))?;
    Ok(response(StatusCode::OK, "application/json", full(bytes)))
}

fn error_response(error: &NodeError, api: Option<Api>) -> Response<Body> {
    let mut response = response(error.status, "application/json", full(error.body(api)));
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
