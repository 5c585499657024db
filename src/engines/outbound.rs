//! The client for everything small that goes to workers beside the bytes of turns: control calls and questions. It shows
//! the workers' key with every request, and speaks TLS where a URL says so.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Builder, Client};
use hyper_util::rt::TokioExecutor;

use super::client::Connector;

type Secure = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// See the module. Clones share its connections.
#[derive(Debug, Clone)]
pub struct Outbound {
    plain: Client<HttpConnector, Full<Bytes>>,
    /// Made when the first https worker is called: the system's authorities take a while to read.
    secure: Arc<OnceLock<Result<Secure, String>>>,
    how: Connector,
    authorization: Option<HeaderValue>,
}

impl Outbound {
    /// A client over such connections.
    pub fn new(how: &Connector) -> Self {
        let authorization = how.key().and_then(|key| HeaderValue::from_str(&format!("Bearer {key}")).ok());
        let authorization = authorization.map(|mut value| {
            value.set_sensitive(true);
            value
        });
        let plain = builder().build(connector(how));
        Self { plain, secure: Arc::default(), how: how.clone(), authorization }
    }

    /// Sends a request and waits for the response's head.
    ///
    /// # Errors
    /// Why there is none, with its causes.
    pub async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>, String> {
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
        }
        let sent = match request.uri().scheme_str() {
            Some("https") => self.secure()?.request(request),
            _ => self.plain.request(request),
        };
        sent.await.map_err(|error| causes(&error))
    }

    fn secure(&self) -> Result<&Secure, String> {
        let client = self.secure.get_or_init(|| {
            let tls = Arc::unwrap_or_clone(self.how.tls()?);
            let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1();
            let mut http = connector(&self.how);
            http.enforce_http(false);
            Ok(builder().build(https.wrap_connector(http)))
        });
        client.as_ref().map_err(Clone::clone)
    }
}

fn connector(how: &Connector) -> HttpConnector {
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.set_connect_timeout(Some(how.timeout()));
    http
}

fn builder() -> Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    // Under the 5 s after which common servers close an idle connection.
    builder.pool_idle_timeout(Duration::from_secs(4));
    builder
}

/// An error with its causes, which say more than "client error (Connect)".
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
