package server

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// authService implements the AuthService. Unlike other services it authenticates its clients itself, also while users are not
// checked: no client that is not known plants a user that comes to life when they are.
type authService struct {
	pb.UnimplementedAuthServiceServer
	*Server
}

// managesUsers is nil if a user has the action users.
func managesUsers(u *auth.User) error {
	var f auth.Footprint
	f.Action(auth.ActionUsers)
	return u.Check(&f)
}

// administrator is the caller of a request that needs the action users.
func (s *authService) administrator(ctx context.Context) (*caller, error) {
	c, err := s.sender(ctx)
	if err != nil {
		return nil, err
	}
	return c, managesUsers(c.user)
}

// subject is what a request about one user is about.
type subject struct {
	sender  *caller
	user    string // the sender, or another one if the sender manages users
	manages bool   // the sender has the action users
}

// subject is the user that a request names; its own, if it names none.
func (s *authService) subject(ctx context.Context, name string) (subject, error) {
	c, err := s.sender(ctx)
	if err != nil {
		return subject{}, err
	}
	denied := managesUsers(c.user)
	about := subject{sender: c, user: name, manages: denied == nil}
	if name == "" || name == c.user.Name {
		about.user = c.user.Name
		return about, nil
	}
	return about, denied
}

// whileKnown is a context in which the users change only if the caller is known then, too, and has the action users, if that is needed: the
// change may wait for one that takes this away.
func (c *caller) whileKnown(ctx context.Context, manages bool) context.Context {
	return users.WithPermit(ctx, func(t *auth.Table) error {
		u, err := t.Verify(&c.identity, time.Now())
		if err == nil && manages {
			err = managesUsers(u)
		}
		return err
	})
}

// whilePermitted is a context in which the users change only if the sender may do the same then.
func (s *subject) whilePermitted(ctx context.Context) context.Context {
	return s.sender.whileKnown(ctx, s.manages)
}

// manage serves a request of an administrator that changes something, and logs it. The context of the change is that of whileKnown.
func (s *authService) manage(ctx context.Context, method telemetry.Method, kind, name string, change func(context.Context) error) error {
	return s.serveAdmin(ctx, method, func() error {
		by, err := s.administrator(ctx)
		if err == nil {
			err = s.refusesWrites()
		}
		if err == nil {
			err = change(by.whileKnown(ctx, true))
		}
		if err == nil {
			s.log.Info("users were changed", "change", method.String(), kind, name, "by", by.user.Name)
		}
		return err
	})
}

// Login implements AuthService.
func (s *authService) Login(ctx context.Context, req *pb.LoginRequest) (*pb.LoginResponse, error) {
	out := new(pb.LoginResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodLogin, func() error {
		if err := s.refusesWrites(); err != nil {
			return err
		}
		secret, info, err := s.gate.users.Login(ctx, req.GetUser(), req.GetPassword(), req.GetLabel(), req.GetLifetime().AsDuration())
		if err == nil {
			out.Token, out.Expires = secret, timestamppb.New(info.Expires)
		}
		return err
	})
}

// Logout implements AuthService.
func (s *authService) Logout(ctx context.Context, _ *pb.LogoutRequest) (*pb.LogoutResponse, error) {
	return new(pb.LogoutResponse), s.serveAdmin(ctx, telemetry.MethodLogout, func() error {
		c, err := s.sender(ctx)
		if err != nil {
			return err
		}
		if c.identity.Method != auth.MethodToken {
			return invalid("authorization", "has no token; a certificate cannot be revoked here")
		}
		return s.gate.users.Logout(ctx, &c.identity)
	})
}

// Bootstrap implements AuthService.
func (s *authService) Bootstrap(ctx context.Context, req *pb.BootstrapRequest) (*pb.BootstrapResponse, error) {
	return new(pb.BootstrapResponse), s.serveAdmin(ctx, telemetry.MethodBootstrap, func() error {
		if err := s.refusesWrites(); err != nil {
			return err
		}
		err := s.gate.users.Bootstrap(ctx, req.GetToken(), req.GetUser(), req.GetPassword())
		if err == nil {
			s.log.Info("the first user with all rights was made", "user", req.GetUser())
		}
		return err
	})
}

// WhoAmI implements AuthService.
func (s *authService) WhoAmI(ctx context.Context, _ *pb.WhoAmIRequest) (*pb.WhoAmIResponse, error) {
	out := new(pb.WhoAmIResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodWhoAmI, func() error {
		t := s.gate.users.Table()
		out.Enabled, out.Revision = t.Enabled, uint64(t.Revision)
		c, err := s.sender(ctx)
		if err != nil {
			return nil //nolint:nilerr // a client that is not known gets the rest of the answer
		}
		out.User, out.Method = c.user.Name, c.identity.Method.String()
		if !c.expires.IsZero() {
			out.Expires = timestamppb.New(c.expires)
		}
		grants, actions := c.user.Rights.Grants()
		out.Grants, out.Actions = grantMessages(grants), actions.Names()
		stored, err := s.gate.users.User(ctx, c.user.Name)
		if err == nil {
			out.Roles = stored.Roles
		}
		return err
	})
}

// Enable implements AuthService.
func (s *authService) Enable(ctx context.Context, _ *pb.EnableRequest) (*pb.EnableResponse, error) {
	return new(pb.EnableResponse), s.manage(ctx, telemetry.MethodEnable, "checked", "true", func(ctx context.Context) error {
		c, err := s.sender(ctx)
		if err != nil {
			return err
		}
		return s.gate.users.Enable(ctx, &c.identity)
	})
}

// Disable implements AuthService.
func (s *authService) Disable(ctx context.Context, _ *pb.DisableRequest) (*pb.DisableResponse, error) {
	return new(pb.DisableResponse), s.manage(ctx, telemetry.MethodDisable, "checked", "false", func(ctx context.Context) error {
		if s.exposedToAll() != nil {
			return errExposed
		}
		return s.gate.users.Disable(ctx)
	})
}

// Explain implements AuthService.
func (s *authService) Explain(ctx context.Context, req *pb.ExplainRequest) (*pb.ExplainResponse, error) {
	out := new(pb.ExplainResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodExplain, func() error {
		about, err := s.subject(ctx, req.GetUser())
		if err != nil {
			return err
		}
		f, err := explained(req)
		if err != nil {
			return err
		}
		u := s.gate.users.Table().Users[about.user]
		switch {
		case u == nil:
			return &users.NotFoundError{Kind: "user", Name: about.user}
		case u.Disabled:
			out.Text = "the user is disabled"
			return nil
		}
		denied := u.Check(f)
		if out.Permitted = denied == nil; !out.Permitted {
			fault, _ := classifyAuth(denied)
			out.Missing, out.Text = fault.metadata["right"], denied.Error()
		}
		return nil
	})
}

// explained is the footprint that a request asks about.
func explained(req *pb.ExplainRequest) (*auth.Footprint, error) {
	f := new(auth.Footprint)
	actions, err := actionsOf(req.GetActions())
	if err != nil {
		return nil, err
	}
	f.Action(actions)
	for _, g := range req.GetGrants() {
		for right, wanted := range map[auth.Right]bool{auth.RightRead: g.GetRead(), auth.RightWrite: g.GetWrite(), auth.RightLease: g.GetLease()} {
			if wanted {
				f.Span(right, g.GetStart(), g.GetEnd())
			}
		}
	}
	return f, nil
}

func actionsOf(names []string) (all auth.Actions, err error) {
	for _, name := range names {
		a := auth.ParseAction(name)
		if a == 0 {
			return 0, invalid("actions", "has "+name+"; expected one of "+auth.ActionsAll.String()+" or all")
		}
		all |= a
	}
	return all, nil
}

func grantMessages(grants []auth.Grant) (all []*pb.KeyGrant) {
	for i := range grants {
		g := &grants[i]
		all = append(all, &pb.KeyGrant{Start: g.Lower, End: g.Upper, Read: g.Read, Write: g.Write, Lease: g.Lease})
	}
	return all
}
