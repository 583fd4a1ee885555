package server

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/transport"
)

// passwordCost is what new passwords cost; zero is the default. Tests change it.
var passwordCost users.HashCost

// userOptions are those of the users of the store.
func (s *Server) userOptions() users.Options {
	return users.Options{
		Hash:    passwordCost,
		Observe: s.gate.publish,
		Client:  networkOf,
		Rule:    users.CertificateRule(s.config.TLS.ClientUser),
		Report: func(what string, err error) {
			s.log.Error("a record cannot be read; it gives no rights", "record", what, "error", err)
		},
	}
}

// networkOf is the network of the client, see transport.NetworkOf.
func networkOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return transport.NetworkOf(p.Addr).String()
	}
	if conn := connectionOf(ctx); conn != nil && conn.addr != nil { // the direct transport's context of a small request has no peer
		return transport.NetworkOf(conn.addr).String()
	}
	return ""
}

// announceBootstrap logs the token that makes the first administrator, as long as there is none.
func (s *Server) announceBootstrap(log *slog.Logger) {
	if token := s.gate.users.BootstrapToken(); token != "" {
		log.Info("there is no user with all rights; kvctl user bootstrap NAME makes the first one with this token, once", "bootstrap_token", token)
	}
}

// sender is the caller of a request that a handler serves, whether users are checked or not.
func (s *Server) sender(ctx context.Context) (*caller, error) {
	var state *tls.ConnectionState
	if conn := connectionOf(ctx); conn != nil {
		state = conn.tls
	}
	c := s.gate.authenticate(state, authorizationOf(ctx), s.gate.users.Table())
	return c, c.err
}

// errExposed refuses to check no users any more.
var errExposed = errors.New("other machines can reach a listener that nothing but users protects; start the server with --tls-client-auth require, on loopback, or with --insecure")

// classifyAuth classifies the errors of users, roles and tokens.
func classifyAuth(err error) (fault, bool) {
	var (
		denied   *auth.DeniedError
		limit    *auth.LimitError
		notFound *users.NotFoundError
		exists   *users.ExistsError
		invalid  *users.InvalidError
	)
	named := func(code codes.Code, reason pb.ErrorReason, kind, name string) (fault, bool) {
		return fault{code: code, reason: reason, metadata: map[string]string{"kind": kind, "name": shortText(name)}}, true
	}
	switch {
	case errors.Is(err, auth.ErrUnauthenticated):
		return fault{code: codes.Unauthenticated, reason: pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED}, true
	case errors.Is(err, auth.ErrTokenExpired):
		return fault{code: codes.Unauthenticated, reason: pb.ErrorReason_ERROR_REASON_TOKEN_EXPIRED}, true
	case errors.As(err, &denied):
		return deniedFault(denied), true
	case errors.As(err, &limit):
		return fault{code: codes.ResourceExhausted, reason: pb.ErrorReason_ERROR_REASON_USER_LIMIT, retry: limit.Retry, metadata: map[string]string{
			"what": limit.What, "limit": strconv.FormatUint(limit.Limit, 10),
		}}, true
	case errors.As(err, &notFound):
		return named(codes.NotFound, pb.ErrorReason_ERROR_REASON_AUTH_NOT_FOUND, notFound.Kind, notFound.Name)
	case errors.As(err, &exists):
		return named(codes.AlreadyExists, pb.ErrorReason_ERROR_REASON_AUTH_EXISTS, exists.Kind, exists.Name)
	case errors.As(err, &invalid):
		return fault{code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, field: invalid.Field}, true
	case errors.Is(err, users.ErrNotEnabled):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_AUTH_NOT_ENABLED}, true
	case errors.Is(err, users.ErrLastAdministrator), errors.Is(err, users.ErrBootstrapped), errors.Is(err, users.ErrNotAdministrator), errors.Is(err, errExposed):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_AUTH_STATE}, true
	}
	return fault{}, false
}

// deniedFault names the missing right, and keys if the request has named them.
func deniedFault(e *auth.DeniedError) fault {
	f := fault{code: codes.PermissionDenied, reason: pb.ErrorReason_ERROR_REASON_PERMISSION_DENIED, metadata: map[string]string{
		"user": e.User, "right": e.Right.String(),
	}}
	switch {
	case e.Right == auth.RightAdmin:
		f.metadata["actions"] = e.Action.String()
	case e.Any || e.Range.Hidden:
	case e.Range.Single:
		pb.SetBytes(f.metadata, "key", e.Range.Lower)
	default:
		pb.SetBytes(f.metadata, "key_lower", e.Range.Lower)
		if len(e.Range.Upper) > 0 {
			pb.SetBytes(f.metadata, "key_upper", e.Range.Upper)
		}
	}
	return f
}
