//! The gateway's own server.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::web::ServiceConfig;
use actix_web::{App, HttpServer, web};

use super::backend::Backend;
use super::{Gateway, admin};

/// A listening gateway.
pub struct Serving {
    /// Runs until the process is told to stop; SIGTERM lets running turns finish.
    pub server: Server,
    /// Where it listens.
    pub addrs: Vec<SocketAddr>,
}

/// Why it cannot listen.
#[derive(Debug)]
pub struct BindError {
    listen: String,
    source: std::io::Error,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listen, source } = self;
        match source.kind() {
            std::io::ErrorKind::AddrInUse => {
                write!(f, "cannot listen on {listen} (http.listen): the port is in use")
            }
            _ => write!(f, "cannot listen on {listen} (http.listen): {source}"),
        }
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Listens and serves. Must be called on an actix or tokio runtime; nothing is served until the returned
/// server is awaited.
///
/// # Errors
/// The address cannot be listened on.
pub fn start<B: Backend>(gateway: Gateway<B>) -> Result<Serving, BindError> {
    start_with(gateway, |_| {})
}

/// As [`start`], with more paths.
///
/// # Errors
/// The address cannot be listened on.
pub fn start_with<B: Backend>(
    gateway: Gateway<B>,
    more: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
) -> Result<Serving, BindError> {
    let http = gateway.http.clone();
    let app = move || {
        let (gateway, more) = (gateway.clone(), more.clone());
        let nothing_else = web::to(admin::not_found);
        App::new().configure(more).configure(|app| gateway.configure(app)).default_service(nothing_else)
    };
    let mut server = HttpServer::new(app)
        .tcp_nodelay(true)
        // By default actix-web takes the end of a client's sending side for a half-close and keeps a silent
        // request running although its client has left.
        .h1_allow_half_closed(false)
        .max_connections(http.max_connections)
        .client_request_timeout(Duration::from_secs(http.request_timeout_s))
        .shutdown_timeout(http.drain_s)
        .keep_alive(match http.keep_alive_s {
            0 => KeepAlive::Disabled,
            seconds => KeepAlive::Timeout(Duration::from_secs(seconds)),
        });
    if http.workers > 0 {
        server = server.workers(http.workers);
    }
    let server =
        server.bind(&http.listen).map_err(|source| BindError { listen: http.listen.clone(), source })?;
    Ok(Serving { addrs: server.addrs(), server: server.run() })
}
