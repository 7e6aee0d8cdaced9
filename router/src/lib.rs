//! The router: ingress, text, queue, placement, sessions and relay.
