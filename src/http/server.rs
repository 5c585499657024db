//! The gateway's own server: its listener, plain or TLS, and the one for administration, if it has one.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use actix_http::error::DispatchError;
use actix_http::{HttpService, KeepAlive};
use actix_server::{GracefulShutdownSignal, Server, ServerBuilder};
use actix_service::{
    IntoServiceFactory as _, ServiceFactory, ServiceFactoryExt as _, fn_service, map_config,
};
use actix_web::App;
use actix_web::dev::AppConfig;
use actix_web::web::{self, ServiceConfig};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::backend::Backend;
use super::wire::Wire;
use super::{Gateway, admin};
use crate::engines::tls;
use crate::settings::{Settings, SettingsError};

/// A listening gateway.
pub struct Serving {
    /// Runs until it is told to stop ([`Server::handle`]). It takes no signals itself.
    pub server: Server,
    /// Where it listens.
    pub addrs: Vec<SocketAddr>,
    /// Where `/admin` and `/metrics` are, when apart.
    pub admin: Option<SocketAddr>,
}

/// Why it cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address is not free, or not one of this machine.
    #[error("cannot listen on {listen} ({key}): {}", reason(source))]
    Listen {
        /// The setting.
        key: &'static str,
        /// Its value.
        listen: String,
        /// Why.
        source: io::Error,
    },
    /// Certificate or key cannot be used.
    #[error("{0}")]
    Tls(String),
    /// Somebody would be let in by oversight.
    #[error(transparent)]
    Access(#[from] SettingsError),
}

fn reason(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::AddrInUse => "the port is in use".into(),
        _ => source.to_string(),
    }
}

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Longest TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A stop is cut short by whoever asks for it, not by the server.
const NO_LIMIT_S: u64 = 365 * 86_400;

/// Listens and serves. Must be called on an actix or tokio runtime; nothing is served until the returned
/// server is awaited.
///
/// # Errors
/// [`BindError`].
pub fn start<B: Backend>(gateway: Gateway<B>) -> Result<Serving, BindError> {
    start_with(gateway, |_| {})
}

/// As [`start`], with more paths.
///
/// # Errors
/// [`BindError`].
pub fn start_with<B: Backend>(
    gateway: Gateway<B>,
    more: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
) -> Result<Serving, BindError> {
    let settings = gateway.front.settings();
    settings.require_access()?;
    let http = &settings.http;
    let tls = tls::server(&http.tls_cert, &http.tls_key).map_err(BindError::Tls)?.map(TlsAcceptor::from);
    let mut builder = Server::build()
        .disable_signals()
        .max_concurrent_connections(http.max_connections)
        .shutdown_timeout(NO_LIMIT_S);
    if http.workers > 0 {
        builder = builder.workers(http.workers);
    }
    let apart = gateway.clone();
    let door = Door::of(&settings, tls);
    let (mut builder, addrs) = door.listen(builder, "http.listen", &http.listen, move |app| {
        more(app);
        gateway.configure(app);
    })?;
    let mut admin = None;
    if !http.admin_listen.is_empty() {
        let plain = Door { tls: None, ..door };
        let configure = move |app: &mut ServiceConfig| apart.configure_apart(app);
        let listened = plain.listen(builder, "http.admin_listen", &http.admin_listen, configure)?;
        (builder, admin) = (listened.0, listened.1.first().copied());
    }
    Ok(Serving { server: builder.run(), addrs, admin })
}

/// How connections are taken.
struct Door {
    tls: Option<TlsAcceptor>,
    keep_alive: KeepAlive,
    request_timeout: Duration,
}

impl Door {
    fn of(settings: &Settings, tls: Option<TlsAcceptor>) -> Self {
        let http = &settings.http;
        let keep_alive = match http.keep_alive_s {
            0 => KeepAlive::Disabled,
            seconds => KeepAlive::Timeout(Duration::from_secs(seconds)),
        };
        Self { tls, keep_alive, request_timeout: Duration::from_secs(http.request_timeout_s) }
    }

    /// Adds the listeners of an address.
    fn listen(
        &self,
        mut builder: ServerBuilder,
        key: &'static str,
        listen: &str,
        configure: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
    ) -> Result<(ServerBuilder, Vec<SocketAddr>), BindError> {
        let failed = |source| BindError::Listen { key, listen: listen.to_owned(), source };
        let mut addrs = Vec::new();
        for addr in listen.to_socket_addrs().map_err(failed)? {
            let listener = bind(addr).map_err(failed)?;
            let addr = listener.local_addr().map_err(failed)?;
            let (tls, keep_alive, timeout) = (self.tls.clone(), self.keep_alive, self.request_timeout);
            let (configure, stopping) = (configure.clone(), builder.graceful_shutdown_signal());
            builder = builder
                .listen(key, listener, move || {
                    service(addr, tls.clone(), (keep_alive, timeout), &stopping, &configure)
                })
                .map_err(failed)?;
            addrs.push(addr);
        }
        Ok((builder, addrs))
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)?.into_std()
}

/// HTTP/1.1 on accepted connections. (HTTP/2 is not offered: its server does not see a client that leaves during silence.)
fn service<C: Fn(&mut ServiceConfig) + Clone>(
    addr: SocketAddr,
    tls: Option<TlsAcceptor>,
    (keep_alive, request_timeout): (KeepAlive, Duration),
    stopping: &GracefulShutdownSignal,
    configure: &C,
) -> impl ServiceFactory<TcpStream, Config = (), Response = (), Error = DispatchError, InitError = ()> + use<C>
{
    let stopping = stopping.clone();
    let app = App::new().configure(configure).default_service(web::to(admin::not_found));
    let app = app.into_factory().map_err(|error: actix_web::Error| error.error_response());
    let http = HttpService::build()
        .graceful_shutdown_signal(move || {
            let stopping = stopping.clone();
            async move { stopping.notified().await }
        })
        .keep_alive(keep_alive)
        .client_request_timeout(request_timeout)
        // By default a client's closed sending side counts as a half-close, and a silent request runs on although its
        // client has left.
        .h1_allow_half_closed(false)
        .local_addr(addr)
        .on_connect_ext(|wire: &Wire, data: &mut actix_http::Extensions| {
            data.insert(wire.peer());
        })
        .h1(map_config(app, |()| AppConfig::default()));
    let tls = tls.map(Arc::new);
    fn_service(move |stream: TcpStream| {
        let tls = tls.clone();
        async move {
            let peer = stream.peer_addr().ok();
            stream.set_nodelay(true)?;
            let wire = match tls {
                None => Wire::plain(stream),
                Some(acceptor) => {
                    let shaken = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
                    Wire::tls(shaken.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??)
                }
            };
            Ok::<_, DispatchError>((wire, peer))
        }
    })
    .and_then(http)
}
