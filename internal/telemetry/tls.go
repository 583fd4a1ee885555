package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// HandshakeResult is how a TLS handshake ended.
type HandshakeResult int

// The results.
const (
	HandshakeOK                HandshakeResult = iota
	HandshakePlain                             // the client does not speak TLS
	HandshakeProtocol                          // no version or protocol in common
	HandshakeClientCertificate                 // none, or one that is not accepted
	HandshakeRefused                           // the client did not accept the server, or its certificate
	HandshakeTimeout
	HandshakeTooMany // too many at once, and this was the oldest
	HandshakeFailed  // for another reason, such as a client that has disconnected
	handshakeResults
)

var handshakeResultNames = [handshakeResults]string{"ok", "plain_text", "protocol", "client_certificate", "refused_by_client", "timeout", "too_many", "failed"}

// String is the value of the label.
func (r HandshakeResult) String() string { return handshakeResultNames[r] }

// HandshakeResults are counts by result.
type HandshakeResults [handshakeResults]uint64

// TLSStats is what the server counts of TLS.
type TLSStats struct {
	Listeners         []string // that speak TLS
	CertificateExpiry time.Time
	Handshakes        HandshakeResults
	Reloads, Failures uint64
}

var (
	tlsExpiryDesc     = desc("tls_certificate_expiry_timestamp_seconds", "Time at which the first certificate of the listener's chain expires; no series without TLS.", "listener")
	tlsReloadsDesc    = descFromStart("tls_reloads_total", "Reloads of the certificate files; after an error the listeners keep the configuration before it.", "result")
	tlsHandshakesDesc = desc("tls_handshakes_total", "TLS handshakes that ended, by result.", "result")
)

func describeTLS(ch chan<- *prometheus.Desc) {
	ch <- tlsExpiryDesc
	ch <- tlsReloadsDesc
	ch <- tlsHandshakesDesc
}

func (s *TLSStats) collect(ch chan<- prometheus.Metric) {
	if len(s.Listeners) == 0 {
		return
	}
	for _, listener := range s.Listeners {
		gauge(ch, tlsExpiryDesc, float64(s.CertificateExpiry.Unix()), listener)
	}
	counter(ch, tlsReloadsDesc, float64(s.Reloads), "ok")
	counter(ch, tlsReloadsDesc, float64(s.Failures), "error")
	for r := range handshakeResults {
		counter(ch, tlsHandshakesDesc, float64(s.Handshakes[r]), r.String())
	}
}
