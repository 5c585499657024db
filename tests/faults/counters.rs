//! The metrics of one schedule.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use kvc_router::telemetry;
use metrics::{
    Counter, Gauge, GaugeFn, Histogram, Key, KeyName, LocalRecorderGuard, Metadata, Recorder, SharedString,
    Unit,
};

#[derive(Debug, Default)]
struct Sum(Mutex<f64>);

impl GaugeFn for Sum {
    fn increment(&self, value: f64) {
        *self.0.lock().unwrap() += value;
    }

    fn decrement(&self, value: f64) {
        *self.0.lock().unwrap() -= value;
    }

    fn set(&self, value: f64) {
        *self.0.lock().unwrap() = value;
    }
}

#[derive(Debug, Default)]
struct Inner {
    requests: Arc<AtomicU64>,
    other: Arc<AtomicU64>,
    inflight: Arc<Sum>,
}

impl Recorder for Inner {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let sum = if key.name() == telemetry::REQUESTS { &self.requests } else { &self.other };
        Counter::from_arc(sum.clone())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        if key.name() == telemetry::INFLIGHT { Gauge::from_arc(self.inflight.clone()) } else { Gauge::noop() }
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// What this thread counts while it lives.
pub struct Counters {
    requests: Arc<AtomicU64>,
    inflight: Arc<Sum>,
    _guard: LocalRecorderGuard<'static>,
}

impl Counters {
    pub fn install() -> Self {
        // A few hundred bytes a schedule stay: the guard wants a recorder that outlives it.
        let inner: &'static Inner = Box::leak(Box::default());
        let (requests, inflight) = (inner.requests.clone(), inner.inflight.clone());
        Self { requests, inflight, _guard: metrics::set_default_local_recorder(inner) }
    }

    /// `kvc_requests_total`, all outcomes.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    pub fn inflight(&self) -> f64 {
        *self.inflight.0.lock().unwrap()
    }
}
