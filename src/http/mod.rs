//! The gateway: the APIs that agents speak, on actix-web.
//!
//! A request's bytes go to the workers as they came, an answer's bytes to the client as they came; both are
//! only looked at in passing. What a turn needs from sessions and actors is behind [`backend`].

pub mod backend;
pub mod errors;
pub mod headers;
pub mod hint;
pub mod live;
pub mod observe;
pub mod server;

mod access;
mod admin;
pub(crate) mod body;
mod count;
pub mod drain;
mod front;
mod holds;
mod meter;
mod relay;
mod resume;
mod turn;
mod wire;

use std::sync::Arc;

use actix_web::web::{self, Data, ServiceConfig};
use actix_web::{HttpRequest, guard};
use bytes::Bytes;

use crate::engines::Engine;
use crate::engines::client::{Client, Connector};
use crate::net::Network;
use crate::prompt::{Api, Strip};
use crate::settings::{Fleet, Settings, is_loopback};
use crate::translate::{self, Translator};
use admin::Door;
use backend::Backend;
use errors::ApiError;
use front::Front;
pub use front::Source;
use hint::Hints;
pub use meter::Totals;

/// The gateway, shared by all serving threads.
#[derive(Clone)]
pub struct Gateway<B> {
    backend: B,
    front: Arc<Front>,
    fleet: Arc<Fleet>,
    hints: Hints,
    engine: Engine,
    connector: Connector,
    listen: String,
    admin_listen: String,
}

/// The gateway on one serving thread.
struct Local<B> {
    backend: B,
    front: Arc<Front>,
    strip: Strip,
    fleet: Arc<Fleet>,
    hints: Hints,
    engine: Engine,
    client: Client,
}

impl<B: Backend> Gateway<B> {
    /// A gateway in front of `backend`, whose workers are reached through `connector`.
    pub fn new(settings: &Settings, backend: B, connector: Connector) -> Self {
        Self::over(settings, settings.fleet.engine(), backend, connector)
    }

    /// A gateway in front of `backend`, with workers of another kind than the settings' fleet.
    pub fn over(settings: &Settings, engine: Engine, backend: B, connector: Connector) -> Self {
        crate::telemetry::install_metrics();
        Self {
            backend,
            front: Arc::new(Front::new(settings)),
            fleet: Arc::new(settings.fleet.clone()),
            hints: Hints::new(&settings.sessions.hint_secret),
            engine,
            connector,
            listen: settings.http.listen.clone(),
            admin_listen: settings.http.admin_listen.clone(),
        }
    }

    /// The same gateway with another way to its workers than TCP.
    pub fn through(self, network: Arc<dyn Network>) -> Self {
        Self { connector: self.connector.through(network), ..self }
    }

    /// Mounts the gateway in an actix-web app; call it in the app's factory, so once per serving thread.
    ///
    /// The app's `HttpServer` needs `.tcp_nodelay(true)`, else a stream's pieces wait for each other, and
    /// `.h1_allow_half_closed(false)`, else a client that leaves during silence is not noticed. `/admin` and
    /// `/metrics` are here unless `http.admin_listen` is set; without keys they are open when `http.listen` is a
    /// loopback address, so an app that listens elsewhere sets keys.
    pub fn configure(&self, app: &mut ServiceConfig) {
        app.app_data(Data::new(self.local()))
            .service(resource("/v1/chat/completions", "POST", web::post().to(turn::chat::<B>)))
            .service(resource("/v1/completions", "POST", web::post().to(turn::completions::<B>)))
            .service(
                resource("/v1/responses", "POST", web::post().to(turn::responses::<B>))
                    .route(web::get().to(admin::no_web_socket)),
            )
            .service(resource("/v1/messages", "POST", web::post().to(turn::messages::<B>)))
            .service(resource("/v1/messages/count_tokens", "POST", web::post().to(count::count_tokens::<B>)))
            .service(resource("/api/hello", "HEAD", web::head().to(admin::hello)))
            .service(resource("/v1/models", "GET", web::get().to(admin::models::<B>)))
            .service(resource("/v1/models/{name:.+}", "GET", web::get().to(admin::model::<B>)));
        if self.admin_listen.is_empty() {
            self.configure_admin(app, is_loopback(&self.listen));
        } else {
            health::<B>(app);
        }
        app.app_data(Data::from(self.front.clone()));
    }

    fn local(&self) -> Local<B> {
        Local {
            backend: self.backend.clone(),
            front: self.front.clone(),
            strip: self.fleet.strip(),
            fleet: self.fleet.clone(),
            hints: self.hints.clone(),
            engine: self.engine.clone(),
            client: Client::new(self.connector.clone()),
        }
    }

    /// `/admin`, `/metrics`, `/health` and `/ready`. `local`: only this machine reaches them.
    fn configure_admin(&self, app: &mut ServiceConfig, local: bool) {
        health::<B>(app);
        app.app_data(Data::new(Door { front: self.front.clone(), local }))
            .service(resource("/metrics", "GET", web::get().to(admin::metrics::<B>)))
            .service(resource("/admin/sessions", "GET", web::get().to(admin::sessions::<B>)))
            .service(
                resource("/admin/workers", "GET, POST", web::get().to(admin::workers::<B>))
                    .route(web::post().to(admin::add_worker::<B>)),
            )
            .service(
                resource(
                    "/admin/workers/{name}",
                    "DELETE, PATCH",
                    web::delete().to(admin::remove_worker::<B>),
                )
                .route(web::patch().to(admin::drain_worker::<B>)),
            )
            .service(resource("/admin/reload", "POST", web::post().to(admin::reload::<B>)))
            .service(resource("/admin/explain/{name}", "GET", web::get().to(admin::record::<B>)));
    }

    /// The listener of its own for what is not API.
    fn configure_apart(&self, app: &mut ServiceConfig) {
        app.app_data(Data::new(self.local())).app_data(Data::from(self.front.clone()));
        self.configure_admin(app, is_loopback(&self.admin_listen));
    }

    /// Where a reload reads settings from.
    pub fn read_from(&self, source: Source) {
        self.front.read_from(source);
    }

    /// Reads the settings anew and takes over what changed: all of it, or nothing.
    ///
    /// # Errors
    /// They are invalid, or a key changed that cannot while turns run.
    pub fn reload(&self) -> Result<Vec<String>, ApiError> {
        self.front.reload(&self.backend)
    }

    /// How its requests ended so far.
    pub fn totals(&self) -> Totals {
        self.front.tally.totals()
    }

    /// The settings of the moment.
    pub fn http(&self) -> Arc<crate::settings::Http> {
        self.front.http()
    }
}

fn health<B: Backend>(app: &mut ServiceConfig) {
    let both = || web::route().guard(guard::Any(guard::Get()).or(guard::Head()));
    app.service(resource("/health", "GET, HEAD", both().to(admin::health))).service(resource(
        "/ready",
        "GET, HEAD",
        both().to(admin::ready::<B>),
    ));
}

/// A body as workers get it.
struct Passed {
    body: Bytes,
    /// What turns their answer back, when they get it in another API.
    back: Option<Translator>,
    /// Types of the tools it lost, by commas.
    dropped: String,
}

impl<B> Local<B> {
    /// The body as workers get it: as it came, unless their engine would choke on it or not understand it.
    fn passed(&self, api: Api, body: Bytes) -> Result<Passed, ApiError> {
        if !self.fleet.speaks(api)
            && let Some(translated) = translate::request(api, &body)?
        {
            return Ok(Passed {
                body: translated.body.into(),
                back: Some(translated.answer),
                dropped: translated.dropped.join(","),
            });
        }
        let stripped = self.strip.body(api, &body)?;
        Ok(Passed { body: stripped.map_or(body, Bytes::from), back: None, dropped: String::new() })
    }
}

/// A path with its methods; `allow` names them all.
fn resource(path: &str, allow: &'static str, route: actix_web::Route) -> actix_web::Resource {
    web::resource(path)
        .route(route)
        .default_service(web::to(move |req: HttpRequest| admin::wrong_method(req, allow)))
}

#[cfg(test)]
mod tests;
