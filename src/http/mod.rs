//! The gateway: the APIs that agents speak, on actix-web.
//!
//! A request's bytes go to the workers as they came, an answer's bytes to the client as they came; both are
//! only looked at in passing. What a turn needs from sessions and actors is behind [`backend`].

pub mod backend;
pub mod errors;
pub mod headers;
pub mod live;
pub mod observe;
pub mod server;

mod admin;
pub(crate) mod body;
mod count;
mod holds;
mod meter;
mod relay;
mod turn;

use std::sync::Arc;
use std::time::Duration;

use actix_web::web::{self, Data, ServiceConfig};
use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::engines::Engine;
use crate::engines::client::Client;
use crate::net::{Network, Tcp};
use crate::prompt::{Api, Strip};
use crate::settings::Settings;
use backend::Backend;
use errors::ApiError;

/// The gateway, shared by all serving threads.
#[derive(Clone)]
pub struct Gateway<B> {
    backend: B,
    http: Arc<crate::settings::Http>,
    strip: Strip,
    network: Arc<dyn Network>,
    engine: Engine,
    connect_timeout: Duration,
    permits: Arc<Semaphore>,
}

/// The gateway on one serving thread.
struct Local<B> {
    backend: B,
    http: Arc<crate::settings::Http>,
    strip: Strip,
    engine: Engine,
    permits: Arc<Semaphore>,
    client: Client,
}

impl<B: Backend> Gateway<B> {
    /// A gateway in front of `backend`.
    pub fn new(settings: &Settings, backend: B) -> Self {
        Self::over(settings, settings.fleet.engine(), backend)
    }

    /// A gateway in front of `backend`, with workers of another kind than the settings' fleet.
    pub fn over(settings: &Settings, engine: Engine, backend: B) -> Self {
        crate::telemetry::install_metrics();
        Self {
            backend,
            http: Arc::new(settings.http.clone()),
            strip: settings.fleet.strip(),
            network: Arc::new(Tcp),
            engine,
            connect_timeout: Duration::from_millis(settings.fleet.connect_timeout_ms),
            permits: Arc::new(Semaphore::new(settings.http.max_inflight)),
        }
    }

    /// The same gateway with another way to its workers than TCP.
    pub fn through(self, network: Arc<dyn Network>) -> Self {
        Self { network, ..self }
    }

    /// Mounts the gateway in an actix-web app; call it in the app's factory, so once per serving thread.
    ///
    /// The app's `HttpServer` needs `.tcp_nodelay(true)`, else a stream's pieces wait for each other, and
    /// `.h1_allow_half_closed(false)`, else a client that leaves during silence is not noticed.
    pub fn configure(&self, app: &mut ServiceConfig) {
        let local = Local {
            backend: self.backend.clone(),
            http: self.http.clone(),
            strip: self.strip,
            engine: self.engine.clone(),
            permits: self.permits.clone(),
            client: Client::over(self.network.clone(), self.connect_timeout),
        };
        app.app_data(Data::new(local))
            .service(resource("/v1/chat/completions", web::post().to(turn::chat::<B>)))
            .service(resource("/v1/completions", web::post().to(turn::completions::<B>)))
            .service(
                resource("/v1/responses", web::post().to(turn::responses::<B>))
                    .route(web::get().to(admin::no_web_socket)),
            )
            .service(resource("/v1/messages", web::post().to(turn::messages::<B>)))
            .service(resource("/v1/messages/count_tokens", web::post().to(count::count_tokens::<B>)))
            .service(resource("/api/hello", web::head().to(admin::hello)))
            .service(resource("/v1/models", web::get().to(admin::models::<B>)))
            .service(resource("/v1/models/{name:.+}", web::get().to(admin::model::<B>)))
            .service(resource("/health", web::get().to(admin::health)))
            .service(resource("/ready", web::get().to(admin::ready::<B>)))
            .service(resource("/metrics", web::get().to(admin::metrics)))
            .service(resource("/admin/sessions", web::get().to(admin::sessions::<B>)))
            .service(resource("/admin/workers", web::get().to(admin::workers::<B>)))
            .service(resource("/admin/explain/{name}", web::get().to(admin::record::<B>)));
    }
}

impl<B> Local<B> {
    /// The body as workers get it: as it came, unless their engine would choke on it.
    fn passed(&self, api: Api, body: Bytes) -> Result<Bytes, ApiError> {
        let stripped = self.strip.body(api, &body);
        let stripped = stripped.map_err(|bad| ApiError::bad_body(bad.message, bad.param))?;
        Ok(stripped.map_or(body, Bytes::from))
    }
}

fn resource(path: &str, route: actix_web::Route) -> actix_web::Resource {
    web::resource(path).route(route).default_service(web::to(admin::wrong_method))
}

#[cfg(test)]
mod tests;
