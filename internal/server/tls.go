package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/certs"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// secure is the TLS of the listeners. It is empty with plain text.
type secure struct {
	source     *certs.Source
	grpc, http *transport.Handshakes
	counts     [len(telemetry.HandshakeResults{})]atomic.Uint64
}

// The names of the listeners in metrics.
const (
	listenerGRPC = "grpc"
	listenerHTTP = "http"
)

var clientAuthTypes = map[config.ClientAuth]tls.ClientAuthType{
	config.ClientAuthNone: tls.NoClientCert, config.ClientAuthRequest: tls.VerifyClientCertIfGiven, config.ClientAuthRequire: tls.RequireAndVerifyClientCert,
}

// openTLS loads the certificates, before anything else exists.
func (s *Server) openTLS() (err error) {
	c, t := &s.config.TLS, &s.endpoints.tls
	if !c.Enabled() {
		return nil
	}
	files := certs.Files{Cert: c.Cert, Key: c.Key, ClientCA: c.ClientCA, ClientAuth: clientAuthTypes[c.ClientAuth], MinVersion: tls.VersionTLS13}
	files.ClientCRL = c.ClientCRL
	if c.Min == config.TLS12 {
		files.MinVersion = tls.VersionTLS12
	}
	if t.source, err = certs.Open(files); err != nil {
		return fmt.Errorf("%w: TLS: %w", ErrConfiguration, err)
	}
	s.warnOfKey()
	options := transport.HandshakeOptions{
		Config: t.source.Config, Protocols: []string{"h2"}, Most: config.HandshakesMax, Timeout: config.HandshakeTimeout,
		Ended: func(peer net.Addr, err error) { s.handshakeEnded(listenerGRPC, peer, err) },
	}
	t.grpc = transport.NewHandshakes(options)
	options.Protocols, options.Most = []string{"http/1.1"}, config.HandshakesHTTPMax
	options.Ended = func(peer net.Addr, err error) { s.handshakeEnded(listenerHTTP, peer, err) }
	t.http = transport.NewHandshakes(options)
	return nil
}

// handshakeEnded counts a handshake, and logs one that failed.
func (s *Server) handshakeEnded(listener string, peer net.Addr, err error) {
	result := handshakeResult(err)
	s.endpoints.tls.counts[result].Add(1)
	if result != telemetry.HandshakeOK {
		s.log.incident(slog.LevelWarn, "handshake "+result.String(), "a TLS handshake failed", err, "listener", listener, "peer", peer.String(), "result", result.String())
	}
}

func handshakeResult(err error) telemetry.HandshakeResult {
	var certificate *tls.CertificateVerificationError
	var remote *net.OpError
	switch {
	case err == nil:
		return telemetry.HandshakeOK
	case errors.Is(err, transport.ErrTooManyHandshakes):
		return telemetry.HandshakeTooMany
	case errors.Is(err, transport.ErrNotTLS):
		return telemetry.HandshakePlain
	case errors.Is(err, transport.ErrNotHTTP2):
		return telemetry.HandshakeProtocol
	case errors.As(err, &certificate), says(err, "didn't provide a certificate"):
		return telemetry.HandshakeClientCertificate
	case errors.Is(err, os.ErrDeadlineExceeded):
		return telemetry.HandshakeTimeout
	case errors.As(err, &remote) && remote.Op == "remote error":
		return telemetry.HandshakeRefused
	case says(err, "unsupported versions"), says(err, "unsupported application protocols"):
		return telemetry.HandshakeProtocol
	}
	return telemetry.HandshakeFailed
}

// says looks into the text of an error of crypto/tls that has no type.
func says(err error, text string) bool { return strings.Contains(err.Error(), text) }

// stats is the part of the metrics about TLS.
func (t *secure) stats(http bool) (st telemetry.TLSStats) {
	if t.source == nil {
		return st
	}
	st.Listeners = []string{listenerGRPC}
	if http {
		st.Listeners = append(st.Listeners, listenerHTTP)
	}
	st.CertificateExpiry = t.source.Info().NotAfter
	for i := range t.counts {
		st.Handshakes[i] = t.counts[i].Load()
	}
	st.Reloads, st.Failures = t.source.Reloads()
	return st
}

// Times before the expiry of a certificate from which on it is a condition.
const (
	expiryWarning  = 14 * 24 * time.Hour
	expiryCritical = 3 * 24 * time.Hour
)

// conditions are those of the certificate files.
func (t *secure) conditions(now time.Time) (found []health.Condition) {
	if t.source == nil {
		return nil
	}
	if err := t.source.Err(); err != nil {
		found = append(found, health.Condition{
			Name: "tls-reload-failed", Severity: health.Warning,
			Message: "the certificate files could not be loaded; the listeners keep the configuration before", Cause: err.Error(),
		})
	}
	info := t.source.Info()
	for _, c := range []struct {
		name, what string
		at         time.Time
	}{
		{"tls-certificate-expires", "the server's certificate", info.NotAfter},
		{"tls-client-ca-expires", "the last authority of client certificates", info.ClientAuthoritiesNotAfter},
	} {
		left := c.at.Sub(now)
		if c.at.IsZero() || left > expiryWarning {
			continue
		}
		condition := health.Condition{
			Name: c.name, Severity: health.Warning, Message: c.what + " expires soon; replace its file, which is then read by itself",
			Cause: "at " + c.at.UTC().Format(time.RFC3339),
		}
		if left <= expiryCritical {
			condition.Severity = health.Degraded
		}
		if left <= 0 {
			condition.Message = c.what + " has expired: new connections fail; replace its file, which is then read by itself"
		}
		found = append(found, condition)
	}
	if at := info.RevocationNextUpdate; !at.IsZero() && now.After(at) {
		found = append(found, health.Condition{
			Name: "tls-revocation-list-old", Severity: health.Warning,
			Message: "a revocation list should have been replaced: certificates that were revoked since are accepted; replace the file of --tls-client-crl, which is then read by itself",
			Cause:   "since " + at.UTC().Format(time.RFC3339),
		})
	}
	return found
}

// watchTLS reloads the certificates when their files change and when asked to, until ctx ends.
func (s *Server) watchTLS(ctx context.Context) {
	t := &s.endpoints.tls
	var watching sync.WaitGroup
	defer watching.Wait()
	if t.source != nil {
		watching.Go(func() { t.source.Watch(ctx, s.reloaded) })
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.drain.reload:
			if t.source != nil {
				s.reloaded(t.source.Reload())
			}
			if _, err := s.reloadConfig(); err != nil {
				s.log.Error("the configuration file could not be loaded; nothing was changed", "error", err)
			}
		}
	}
}

// reloaded logs a reload.
func (s *Server) reloaded(changed bool, err error) {
	if err != nil {
		s.log.Error("the certificate files could not be loaded; the listeners keep the configuration before", "error", err)
		return
	}
	if changed {
		s.warnOfKey()
	}
	info := s.endpoints.tls.source.Info()
	s.log.Info("certificates loaded", "changed", changed, "subject", info.Subject, "serial", info.Serial, "not_after", info.NotAfter, "client_authorities", info.ClientAuthorities)
}

// warnOfKey warns of a key that every account of this machine may read.
func (s *Server) warnOfKey() {
	if s.endpoints.tls.source.Info().KeyExposed {
		s.log.Warn("other accounts of this machine may use the TLS key; chmod o= takes that away", "file", s.config.TLS.Key)
	}
}

var errNoTLS = errors.New("server: the server has no certificates to reload; start it with --tls-cert and --tls-key")

// reloadError is a reload that changed nothing, because something is wrong with the files.
type reloadError struct{ cause error }

func (e *reloadError) Error() string { return "the configuration before stays: " + e.cause.Error() }
func (e *reloadError) Unwrap() error { return e.cause }

// ReloadTLS implements Admin.
func (s *adminService) ReloadTLS(ctx context.Context, _ *pb.ReloadTLSRequest) (*pb.ReloadTLSResponse, error) {
	out := new(pb.ReloadTLSResponse)
	err := s.serveAdmin(ctx, telemetry.MethodReloadTLS, func() error {
		source := s.endpoints.tls.source
		if source == nil {
			return errNoTLS
		}
		changed, err := source.Reload()
		s.reloaded(changed, err)
		if err != nil {
			return &reloadError{err}
		}
		info := source.Info()
		out.Changed, out.Subject, out.Names, out.Serial, out.NotAfter = changed, info.Subject, info.Names, info.Serial, timestamppb.New(info.NotAfter)
		if out.ClientAuthorities = uint32(info.ClientAuthorities); out.ClientAuthorities > 0 {
			out.ClientAuthoritiesNotAfter = timestamppb.New(info.ClientAuthoritiesNotAfter)
		}
		return nil
	})
	return out, err
}

// classifyTLS classifies the errors of this file.
func classifyTLS(err error) (fault, bool) {
	var failed *reloadError
	switch {
	case errors.Is(err, errNoTLS):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_TLS_NOT_CONFIGURED}, true
	case errors.As(err, &failed):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_TLS_RELOAD_FAILED}, true
	}
	return fault{}, false
}
