//! The pure policies of a router: request queue and placement.
