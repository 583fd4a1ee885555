package server

import (
	"context"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// CreateUser implements AuthService.
func (s *authService) CreateUser(ctx context.Context, req *pb.CreateUserRequest) (*pb.CreateUserResponse, error) {
	return new(pb.CreateUserResponse), s.manage(ctx, telemetry.MethodCreateUser, "user", req.GetName(), func(ctx context.Context) error {
		u := users.User{Name: req.GetName(), Roles: req.GetRoles(), Limits: limitsOf(req.GetLimits())}
		return s.gate.users.CreateUser(ctx, u, req.GetPassword())
	})
}

// UpdateUser implements AuthService.
func (s *authService) UpdateUser(ctx context.Context, req *pb.UpdateUserRequest) (*pb.UpdateUserResponse, error) {
	return new(pb.UpdateUserResponse), s.manage(ctx, telemetry.MethodUpdateUser, "user", req.GetName(), func(ctx context.Context) error {
		c := &users.UserChange{AddRoles: req.GetAddRoles(), RemoveRoles: req.GetRemoveRoles(), Disabled: req.Disabled}
		if req.GetLimits() != nil {
			limits := limitsOf(req.GetLimits())
			c.Limits = &limits
		}
		return s.gate.users.UpdateUser(ctx, req.GetName(), c)
	})
}

// DeleteUser implements AuthService.
func (s *authService) DeleteUser(ctx context.Context, req *pb.DeleteUserRequest) (*pb.DeleteUserResponse, error) {
	return new(pb.DeleteUserResponse), s.manage(ctx, telemetry.MethodDeleteUser, "user", req.GetName(), func(ctx context.Context) error {
		return s.gate.users.DeleteUser(ctx, req.GetName())
	})
}

// ListUsers implements AuthService.
func (s *authService) ListUsers(ctx context.Context, _ *pb.ListUsersRequest) (*pb.ListUsersResponse, error) {
	out := new(pb.ListUsersResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodListUsers, func() error {
		if _, err := s.administrator(ctx); err != nil {
			return err
		}
		all, err := s.gate.users.Users(ctx)
		for _, u := range all {
			out.Users = append(out.Users, &pb.User{
				Name: u.Name, Roles: u.Roles, Disabled: u.Disabled, Limits: limitsMessage(&u.Limits), Created: timestamppb.New(u.Created), HasPassword: u.HasPassword(),
			})
		}
		return err
	})
}

// SetPassword implements AuthService.
func (s *authService) SetPassword(ctx context.Context, req *pb.SetPasswordRequest) (*pb.SetPasswordResponse, error) {
	return new(pb.SetPasswordResponse), s.serveAdmin(ctx, telemetry.MethodSetPassword, func() error {
		about, err := s.subject(ctx, req.GetUser())
		if err == nil {
			err = s.refusesWrites()
		}
		if err != nil {
			return err
		}
		if req.GetRemove() != (req.GetPassword() == "") {
			return invalid("password", "must be given, or remove must be set, and not both")
		}
		permitted := about.whilePermitted(ctx)
		if about.manages {
			err = s.gate.users.SetPassword(permitted, about.user, req.GetPassword())
		} else { // a token that was stolen does not become a password
			err = s.gate.users.ChangePassword(permitted, about.user, req.GetCurrentPassword(), req.GetPassword())
		}
		if err != nil {
			return err
		}
		s.log.Info("users were changed", "change", telemetry.MethodSetPassword.String(), "user", about.user)
		return nil
	})
}

// CreateRole implements AuthService.
func (s *authService) CreateRole(ctx context.Context, req *pb.CreateRoleRequest) (*pb.CreateRoleResponse, error) {
	return new(pb.CreateRoleResponse), s.manage(ctx, telemetry.MethodCreateRole, "role", req.GetRole().GetName(), func(ctx context.Context) error {
		role, err := roleOf(req.GetRole())
		if err != nil {
			return err
		}
		return s.gate.users.CreateRole(ctx, role)
	})
}

// UpdateRole implements AuthService.
func (s *authService) UpdateRole(ctx context.Context, req *pb.UpdateRoleRequest) (*pb.UpdateRoleResponse, error) {
	return new(pb.UpdateRoleResponse), s.manage(ctx, telemetry.MethodUpdateRole, "role", req.GetRole().GetName(), func(ctx context.Context) error {
		role, err := roleOf(req.GetRole())
		if err != nil {
			return err
		}
		return s.gate.users.UpdateRole(ctx, role)
	})
}

// DeleteRole implements AuthService.
func (s *authService) DeleteRole(ctx context.Context, req *pb.DeleteRoleRequest) (*pb.DeleteRoleResponse, error) {
	return new(pb.DeleteRoleResponse), s.manage(ctx, telemetry.MethodDeleteRole, "role", req.GetName(), func(ctx context.Context) error {
		return s.gate.users.DeleteRole(ctx, req.GetName())
	})
}

// ListRoles implements AuthService.
func (s *authService) ListRoles(ctx context.Context, _ *pb.ListRolesRequest) (*pb.ListRolesResponse, error) {
	out := new(pb.ListRolesResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodListRoles, func() error {
		if _, err := s.administrator(ctx); err != nil {
			return err
		}
		all, err := s.gate.users.Roles(ctx)
		for _, r := range all {
			out.Roles = append(out.Roles, &pb.Role{Name: r.Name, Grants: grantMessages(r.Grants), Actions: r.Actions.Names()})
		}
		return err
	})
}

// tokenLifetimeMax keeps times in the range of records.
const tokenLifetimeMax = 100 * 365 * 24 * time.Hour

// CreateToken implements AuthService.
func (s *authService) CreateToken(ctx context.Context, req *pb.CreateTokenRequest) (*pb.CreateTokenResponse, error) {
	out := new(pb.CreateTokenResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodCreateToken, func() error {
		about, err := s.subject(ctx, req.GetUser())
		if err == nil {
			err = s.refusesWrites()
		}
		if err != nil {
			return err
		}
		n := users.NewToken{User: about.user, Label: req.GetLabel()}
		if by := &about.sender.identity; !about.manages && by.Method == auth.MethodToken {
			n.Maker = &by.Token
		}
		if req.GetLifetime() != nil {
			lifetime := req.GetLifetime().AsDuration()
			if lifetime < time.Second || lifetime > tokenLifetimeMax {
				return invalid("lifetime", "must be from 1s to 100 years")
			}
			n.Expires = time.Now().Add(lifetime)
		}
		secret, info, err := s.gate.users.CreateToken(about.whilePermitted(ctx), n)
		if err == nil {
			out.Token, out.Info = secret, tokenMessage(&info)
			s.log.Info("users were changed", "change", telemetry.MethodCreateToken.String(), "user", about.user, "token", info.ID)
		}
		return err
	})
}

// ListTokens implements AuthService.
func (s *authService) ListTokens(ctx context.Context, req *pb.ListTokensRequest) (*pb.ListTokensResponse, error) {
	out := new(pb.ListTokensResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodListTokens, func() error {
		about, err := s.subject(ctx, req.GetUser())
		if err == nil && req.GetAll() {
			about.user, err = "", managesUsers(about.sender.user)
		}
		if err != nil {
			return err
		}
		all, err := s.gate.users.Tokens(ctx, about.user)
		for i := range all {
			out.Tokens = append(out.Tokens, tokenMessage(&all[i]))
		}
		return err
	})
}

// RevokeToken implements AuthService.
func (s *authService) RevokeToken(ctx context.Context, req *pb.RevokeTokenRequest) (*pb.RevokeTokenResponse, error) {
	return new(pb.RevokeTokenResponse), s.serveAdmin(ctx, telemetry.MethodRevokeToken, func() error {
		about, err := s.subject(ctx, "")
		if err == nil {
			err = s.refusesWrites()
		}
		if err != nil {
			return err
		}
		if about.manages {
			about.user = "" // of any user
		}
		return s.gate.users.RevokeToken(about.whilePermitted(ctx), req.GetId(), about.user)
	})
}

func tokenMessage(i *users.TokenInfo) *pb.Token {
	out := &pb.Token{Id: i.ID, User: i.User, Label: i.Label, Session: i.Session, Created: timestamppb.New(i.Created)}
	if !i.Expires.IsZero() {
		out.Expires = timestamppb.New(i.Expires)
	}
	if !i.LastUsed.IsZero() {
		out.LastUsed = timestamppb.New(i.LastUsed)
	}
	return out
}

func roleOf(m *pb.Role) (*users.Role, error) {
	actions, err := actionsOf(m.GetActions())
	if err != nil {
		return nil, err
	}
	role := &users.Role{Name: m.GetName(), Actions: actions}
	for _, g := range m.GetGrants() {
		if max(len(g.GetStart()), len(g.GetEnd())) > math.MaxUint16 {
			return nil, invalid("grants", "a bound is longer than a key may be")
		}
		role.Grants = append(role.Grants, auth.Grant{Lower: g.GetStart(), Upper: g.GetEnd(), Read: g.GetRead(), Write: g.GetWrite(), Lease: g.GetLease()})
	}
	return role, nil
}

func limitsOf(m *pb.UserLimits) auth.Limits {
	return auth.Limits{
		Requests: m.GetRequests(), BytesIn: m.GetBytesIn(), BytesOut: m.GetBytesOut(), Streams: m.GetStreams(), Watches: m.GetWatches(), Transactions: m.GetTransactions(),
	}
}

func limitsMessage(l *auth.Limits) *pb.UserLimits {
	if *l == (auth.Limits{}) {
		return nil
	}
	return &pb.UserLimits{Requests: l.Requests, BytesIn: l.BytesIn, BytesOut: l.BytesOut, Streams: l.Streams, Watches: l.Watches, Transactions: l.Transactions}
}
