"""A small scope resolver over ast: binding scope of every name."""

import ast


class Scope:
    __slots__ = ("bound", "globals_", "imports", "kind", "node", "nonlocals", "parent", "uses")

    def __init__(s, node, kind, parent):
        s.node, s.kind, s.parent = node, kind, parent
        s.bound = set()
        s.globals_ = set()
        s.nonlocals = set()
        s.uses = []
        s.imports = {}

    def module(s):
        while s.parent is not None:
            s = s.parent
        return s


class Builder(ast.NodeVisitor):
    """uses: list of (scope, ast node, name, role) where role in load/store/def/arg/import/kw"""

    def __init__(self, tree):
        self.scope = self.root = Scope(tree, "module", None)
        self.uses = []
        self.scope_of = {}
        for n in tree.body:
            self.visit(n)

    def bind(self, name, scope=None):
        s = scope or self.scope
        if name in s.globals_:
            s.module().bound.add(name)
        elif name in s.nonlocals:
            pass
        else:
            s.bound.add(name)

    def use(self, node, name, role):
        self.uses.append((self.scope, node, name, role))

    def visit_Global(self, n):
        self.scope.globals_.update(n.names)

    def visit_Nonlocal(self, n):
        self.scope.nonlocals.update(n.names)

    def visit_Name(self, n):
        if isinstance(n.ctx, (ast.Store, ast.Del)):
            self.bind(n.id)
            self.use(n, n.id, "store")
        else:
            self.use(n, n.id, "load")

    def visit_Import(self, n):
        for a in n.names:
            name = a.asname or a.name.split(".")[0]
            self.bind(name)
            self.scope.imports[name] = n
            self.use(n, name, "import")

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, n):
        if n.name:
            self.bind(n.name)
            self.use(n, n.name, "except")
        self.generic_visit(n)

    def visit_MatchAs(self, n):
        if n.name:
            self.bind(n.name)
            self.use(n, n.name, "match")
        self.generic_visit(n)

    def visit_MatchStar(self, n):
        if n.name:
            self.bind(n.name)
            self.use(n, n.name, "match")

    def visit_NamedExpr(self, n):
        s = self.scope
        while s.kind == "comp":
            s = s.parent
        if n.target.id not in s.globals_ and n.target.id not in s.nonlocals:
            s.bound.add(n.target.id)
        # resolves from here upwards to s
        self.use(n.target, n.target.id, "load")
        self.visit(n.value)

    def func(self, n, name):
        a = n.args
        for d in a.defaults + [d for d in a.kw_defaults if d]:
            self.visit(d)
        args = a.posonlyargs + a.args + a.kwonlyargs + ([a.vararg] if a.vararg else []) + ([a.kwarg] if a.kwarg else [])
        for x in args:
            if x.annotation:
                self.visit(x.annotation)
        if name:
            for d in n.decorator_list:
                self.visit(d)
            if n.returns:
                self.visit(n.returns)
            self.bind(n.name)
            self.use(n, n.name, "def")
        old = self.scope
        self.scope = Scope(n, "function", old)
        self.scope_of[n] = self.scope
        for x in args:
            self.scope.bound.add(x.arg)
            self.use(x, x.arg, "arg")
        body = n.body if isinstance(n.body, list) else [n.body]
        # pre-scan global/nonlocal
        for b in body:
            for c in ast.walk(b):
                if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                    continue
                if isinstance(c, ast.Global):
                    self.scope.globals_.update(c.names)
                if isinstance(c, ast.Nonlocal):
                    self.scope.nonlocals.update(c.names)
        for b in body:
            self.visit(b)
        self.scope = old

    def visit_FunctionDef(self, n):
        self.func(n, True)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, n):
        self.func(n, False)

    def visit_ClassDef(self, n):
        for d in n.decorator_list + n.bases + [k.value for k in n.keywords]:
            self.visit(d)
        self.bind(n.name)
        self.use(n, n.name, "def")
        old = self.scope
        self.scope = Scope(n, "class", old)
        self.scope_of[n] = self.scope
        for b in n.body:
            self.visit(b)
        self.scope = old

    def comp(self, n, *elts):
        self.visit(n.generators[0].iter)
        old = self.scope
        self.scope = Scope(n, "comp", old)
        self.scope_of[n] = self.scope
        for i, g in enumerate(n.generators):
            self.visit(g.target)
            if i:
                self.visit(g.iter)
            for c in g.ifs:
                self.visit(c)
        for e in elts:
            self.visit(e)
        self.scope = old

    def visit_ListComp(self, n):
        self.comp(n, n.elt)

    visit_SetComp = visit_ListComp
    visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, n):
        self.comp(n, n.key, n.value)


def resolve(scope, name):
    """the scope that binds name when used in scope, or None"""
    s = scope
    first = True
    while s is not None:
        if s.kind == "class" and not first:
            s = s.parent
            continue
        if name in s.globals_:
            return s.module() if name in s.module().bound else None
        if name in s.bound and name not in s.nonlocals:
            return s
        first = False
        s = s.parent
    return None
