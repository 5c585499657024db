//! Small questions to engines, apart from the bytes of turns: what they are and how they do.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};

use super::client::Connector;
use super::outbound::{Outbound, causes};

/// Largest answer that is read, in bytes: metrics pages are long.
const MAX_ANSWER: usize = 4 << 20;
/// Longest wait for an answer. An engine under load answers late, not never.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unwell {
    /// Nobody is there: what ran there is gone, and its KV with it.
    #[error("not up: {0}")]
    Gone(String),
    /// It takes too long.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Slow,
    /// It answers, and not as it must.
    #[error("{0}")]
    Unfit(String),
}

/// A client for questions. Clones share its connections.
#[derive(Debug, Clone)]
pub struct Fetch(Outbound);

impl Fetch {
    /// A client over such connections.
    pub fn new(how: &Connector) -> Self {
        Self(Outbound::new(how))
    }

    /// `GET url`: the status and the body.
    ///
    /// # Errors
    /// [`Unwell::Gone`], [`Unwell::Slow`].
    pub async fn get(&self, url: &str) -> Result<(StatusCode, Bytes), Unwell> {
        self.ask(Method::GET, url, Bytes::new(), PATIENCE).await
    }

    /// `POST url` with a JSON body, within `patience`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn post(
        &self,
        url: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<(StatusCode, Bytes), Unwell> {
        self.ask(Method::POST, url, body, patience).await
    }

    async fn ask(
        &self,
        method: Method,
        url: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<(StatusCode, Bytes), Unwell> {
        let gone = |error: &dyn std::error::Error| Unwell::Gone(causes(error));
        let request = Request::builder()
            .method(method)
            .uri(url)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|e| gone(&e))?;
        let answered = async {
            let response = self.0.send(request).await.map_err(Unwell::Gone)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            Ok((status, body.map_err(|e| Unwell::Gone(e.to_string()))?.to_bytes()))
        };
        tokio::time::timeout(patience, answered).await.unwrap_or(Err(Unwell::Slow))
    }
}
