//! Where the fault lab reaches into the product. Without the feature `fault-lab`, which only the crate's own tests
//! turn on, both macros are nothing.

/// Whether a bug is planted here.
macro_rules! planted {
    ($bug:ident) => {{
        #[cfg(feature = "fault-lab")]
        let planted = $crate::fault_lab::planted($crate::fault_lab::Bug::$bug);
        #[cfg(not(feature = "fault-lab"))]
        let planted = false;
        planted
    }};
}

/// An actor is about to take a message, or has just taken it: it may be slowed down or panic here.
macro_rules! fault_site {
    ($site:expr) => {
        #[cfg(feature = "fault-lab")]
        $crate::fault_lab::at($site).await;
    };
}
